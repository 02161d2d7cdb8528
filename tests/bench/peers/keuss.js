// Keuss 2.0.6 on MongoDB, with its signals by Redis: those of a capped collection fail in a second
// process, because the collection exists. `program.py` has the commands.
'use strict';

const say = (value) => process.stdout.write(JSON.stringify(value) + '\n');
let MQ, signal;
try {
  MQ = require('keuss/backends/mongo');
  signal = require('keuss/signal/redis-pubsub');
} catch (error) {
  say({ skipped: 'npm install keuss@2.0.6, and set NODE_PATH' });
  process.exit(0);
}

const [base, query] = process.argv[2].split('?');
const url = `${base}_keuss?${query ? query + '&' : ''}w=majority&journal=true`;
const text = 'x'.repeat(167);
const LOST_AFTER_MS = 20000;
const now = () => Number(process.hrtime.bigint()) / 1e9;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const call = (target, method, ...given) =>
  new Promise((done, failed) => target[method](...given, (error, value) => (error ? failed(error) : done(value))));
const cpu = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };

class Inbox {
  constructor(count) { this.count = count; this.numbers = []; this.times = []; this.seen = new Set(); this.last = 0; this.came = []; }
  add(payload) {
    this.last = now();
    this.came.push(this.last);
    this.times.push(this.last - payload.pushed);
    this.numbers.push(payload.n);
    this.seen.add(payload.n);
  }
  // The time at the pace after the first `warm` messages, which came while the consumers started.
  seconds(warm) {
    const skipped = Math.min(warm, this.came.length - 1);
    return ((this.last - this.came[skipped - 1]) * this.came.length) / (this.came.length - skipped);
  }
  get complete() { return this.seen.size >= this.count; }
  result() {
    return { times: this.times, lost: this.count - this.seen.size, twice: this.numbers.length - this.seen.size };
  }
}

const push = (queue, n) => call(queue, 'push', { n, text, pushed: now() });

// Receive with reserve and ok until the inbox is complete or nothing comes any more.
async function receive(queue, inbox, handle) {
  const watch = setInterval(() => {
    if (now() - (inbox.last || began) > LOST_AFTER_MS / 1000) queue.cancel();
  }, 1000);
  const began = now();
  while (!inbox.complete) {
    const item = await call(queue, 'pop', 'bench', { reserve: true }).catch((error) => {
      if (error === 'cancel') return null;
      throw error;
    });
    if (item === null) break;
    inbox.add(item.payload);
    if (handle) await handle(item.payload);
    await call(queue, 'ok', item._id);
  }
  clearInterval(watch);
  queue.cancel(); // the other callers, which wait
}

const inParallel = (callers, work) => Promise.all(Array.from({ length: callers }, work));

const commands = {
  async fill(queue, given) {
    let next = given.first || 0;
    const [start, spent] = [now(), cpu()];
    await inParallel(given.callers, async () => { while (next < given.count) await push(queue, next++); });
    return { seconds: now() - start, cpu: cpu() - spent };
  },
  async drain(queue, given) {
    const inbox = new Inbox(given.count);
    const spent = cpu();
    await inParallel(given.callers, () => receive(queue, inbox));
    return { seconds: inbox.seconds(given.callers), cpu: cpu() - spent, ...inbox.result(), times: [] };
  },
  async listen(queue, given) {
    const inbox = new Inbox(given.count);
    say({ listening: true });
    await receive(queue, inbox);
    return inbox.result();
  },
  async send(queue, given) {
    for (let n = 0; n < given.count; n++) { await push(queue, n); await pause(20 + 60 * Math.random()); }
    return {};
  },
  async echo(queue, given, reply) {
    const inbox = new Inbox(given.count);
    say({ listening: true });
    await receive(queue, inbox, (payload) => push(reply, payload.n));
    return inbox.result();
  },
  async exchange(queue, given, reply) {
    const inbox = new Inbox(given.count);
    let came = () => {};
    const received = receive(reply, inbox, async () => came());
    await pause(1000 * given.settle);
    for (let n = 0; n < given.count; n++) {
      const arrival = new Promise((done) => { came = done; });
      await push(queue, n);
      await Promise.race([arrival, pause(LOST_AFTER_MS)]);
    }
    await received;
    return inbox.result();
  },
};

async function main() {
  const signaller = { provider: signal, opts: { Redis: process.argv[3] } };
  const factory = await new Promise((done, failed) =>
    MQ({ url, name: 'bench', signaller }, (error, made) => (error ? failed(error) : done(made))));
  const queues = {};
  const open = async (name) => (queues[name] = queues[name] || (await call(factory, 'queue', name, {})));
  say({ ready: true });
  for await (const line of require('readline').createInterface({ input: process.stdin })) {
    const given = JSON.parse(line);
    const reply = given.reply ? await open(given.reply) : null;
    say(await commands[given.do](await open(given.queue), given, reply));
  }
  process.exit(0);
}

main().catch((error) => { console.error(error.stack.split('\n').slice(0, 3).join(' ')); process.exit(1); });

// Keuss 2.0.6 on MongoDB: concurrent pushes, then concurrent reserve and ok.
'use strict';

let MQ;
try {
  MQ = require('keuss/backends/mongo');
} catch (error) {
  console.log(JSON.stringify({ skipped: 'npm install keuss@2.0.6' }));
  process.exit(0);
}

const [url, count, callers] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];
// A database for each round: a second process on the same database fails, because the collection of
// its signals exists.
const [base, query] = url.split('?');
const sure = `${base}_${process.pid}?${query ? query + '&' : ''}w=majority&journal=true`;
const call = (target, method, ...given) =>
  new Promise((done, failed) => target[method](...given, (error, value) => (error ? failed(error) : done(value))));

async function main() {
  const factory = await new Promise((done, failed) =>
    MQ({ url: sure, name: 'bench' }, (error, made) => (error ? failed(error) : done(made))));
  const queue = await call(factory, 'queue', 'keuss' + Date.now() + process.pid, {});
  const text = 'x'.repeat(167);
  const received = [];
  let pushed = 0;
  const push = async () => {
    while (pushed < count) await call(queue, 'push', { n: pushed++, text });
  };
  const receive = async () => {
    while (received.length < count) {
      const item = await call(queue, 'pop', 'bench', { reserve: true, timeout: 1000 }).catch((error) => {
        if (error.timeout) return null;
        throw error;
      });
      if (item === null) return;
      received.push(item.payload.n);
      await call(queue, 'ok', item._id);
    }
  };
  const inParallel = (work) => Promise.all(Array.from({ length: callers }, work));
  const start = process.hrtime.bigint();
  await inParallel(push);
  const middle = process.hrtime.bigint();
  let end = middle;
  await inParallel(() => receive().then(() => { end = end === middle && received.length >= count ? process.hrtime.bigint() : end; }));
  if (end === middle) end = process.hrtime.bigint();
  const seconds = (from, to) => Number(to - from) / 1e9;
  console.log(JSON.stringify({
    push: seconds(start, middle), receive: seconds(middle, end), received: received.length, distinct: new Set(received).size,
  }));
  process.exit(0);
}

main().catch((error) => { console.error(error.stack.split('\n').slice(0, 3).join(' ')); process.exit(1); });

// Live numbers, "/" for the search, and nothing else: all pages work without this.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const state = document.getElementById("state");
  const cells = new Map();
  for (const each of document.querySelectorAll("[data-live], [data-line]")) {
    const key = each.dataset.live ?? each.dataset.line;
    cells.set(key, [...(cells.get(key) ?? []), each]);
  }
  let source = null;

  const show = (look, text) => {
    state.className = "state " + look;
    state.textContent = text;
  };

  const change = (event) => {
    show("good", "live");
    for (const [key, text] of Object.entries(JSON.parse(event.data))) {
      for (const each of cells.get(key) ?? []) {
        if (each.dataset.line) {
          each.setAttribute("points", text);
        } else if (each.textContent !== text) {
          each.textContent = text;
          each.classList.remove("changed");
          void each.offsetWidth; // begin the animation again
          each.classList.add("changed");
        }
      }
    }
  };

  const start = () => {
    if (source || !cells.size) return;
    source = new EventSource(root + "/live");
    source.addEventListener("cells", change);
    source.addEventListener("down", () => show("bad", "no database"));
    source.addEventListener("error", () => {
      show("bad", "not connected");
      if (source && source.readyState === EventSource.CLOSED) {
        stop();
        setTimeout(start, 5000);
      }
    });
  };

  const stop = () => {
    if (source) source.close();
    source = null;
  };

  // A page that is not visible asks for nothing.
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  window.addEventListener("pagehide", stop);
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      document.querySelector(".search input").focus();
    }
  });
  start();
})();

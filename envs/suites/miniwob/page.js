// Runs in every page before its own scripts, and makes an episode repeat exactly: the page's clock
// stands still but for `dart.pass`, so that how fast the host or the policy is changes nothing.
// Python calls `dart.ready`, `dart.preload`, `dart.start`, `dart.pass` and `dart.wheel`; elements.js asks
// `dart.pressed`.
(() => {
  "use strict";

  // --- the clock ----------------------------------------------------------------------------

  // When each episode begins. After 2016: the date pickers of choose-date* and book-flight* are limited to
  // that year, and open in its December under every clock that is past it.
  const START = Date.UTC(2024, 0, 8, 12);
  const FRAME = 16; // ms between animation frames
  const MOST = 20000; // callbacks of one tick: a page that never comes to rest is left alone

  const RealDate = Date;
  const timers = new Map(); // id -> {due, every, call}
  let now = 0; // ms since the page was loaded
  let origin = 0; // `now` when the episode began
  let serial = 0;

  const today = () => START + now - origin;

  function PageDate(...parts) {
    if (!new.target) return new RealDate(today()).toString();
    return Reflect.construct(RealDate, parts.length ? parts : [today()], new.target);
  }
  PageDate.prototype = RealDate.prototype;
  PageDate.prototype.constructor = PageDate;
  PageDate.now = today;
  PageDate.parse = RealDate.parse;
  PageDate.UTC = RealDate.UTC;
  window.Date = PageDate;
  performance.now = () => now - origin;

  const add = (call, due, every) => {
    timers.set(++serial, { due, every, call });
    return serial;
  };
  const later = (call, ms, parts) => {
    const run = typeof call === "function" ? () => call.apply(window, parts) : () => {};
    return [run, Math.max(1, Number(ms) || 0)];
  };
  window.setTimeout = (call, ms, ...parts) => {
    const [run, wait] = later(call, ms, parts);
    return add(run, now + wait, 0);
  };
  window.setInterval = (call, ms, ...parts) => {
    const [run, wait] = later(call, ms, parts);
    return add(run, now + wait, wait);
  };
  window.requestAnimationFrame = (call) =>
    add(() => call(now - origin), (Math.floor(now / FRAME) + 1) * FRAME, 0);
  window.clearTimeout = window.clearInterval = window.cancelAnimationFrame = (id) => {
    timers.delete(id);
  };

  const next = (until) => {
    let found = null;
    for (const [id, timer] of timers) {
      if (timer.due <= until && (found === null || timer.due < timers.get(found).due)) found = id;
    }
    return found;
  };

  const tick = (ms) => {
    const until = now + ms;
    for (let count = 0; count < MOST; count++) {
      const id = next(until);
      if (id === null) break;
      const timer = timers.get(id);
      now = Math.max(now, timer.due);
      if (timer.every) timer.due += timer.every;
      else timers.delete(id);
      try {
        timer.call();
      } catch (error) {
        // As in a browser: a page's mistake ends one callback, and no other.
        dispatchEvent(new ErrorEvent("error", { error, message: String(error) }));
      }
    }
    now = until;
  };

  // --- what all pages of a browser would share, or would stop at -------------------------------

  let clipboard = ""; // one for each page: the browser has one for all
  const copied = () => clipboard; // for the oracle
  const selected = () => {
    const field = document.activeElement;
    return field && typeof field.value === "string" && field.selectionStart !== null
      ? field.value.slice(field.selectionStart, field.selectionEnd)
      : String(getSelection());
  };
  for (const kind of ["copy", "cut"]) {
    addEventListener(kind, (event) => {
      clipboard = selected();
      event.preventDefault();
      if (kind === "cut") document.execCommand("delete");
    }, true);
  }
  addEventListener("paste", (event) => {
    event.preventDefault();
    document.execCommand("insertText", false, clipboard);
  }, true);

  // A drag of a picture or of selected text would leave the page for the desktop, which is not there.
  addEventListener("dragstart", (event) => event.preventDefault(), true);

  // A field's own picker (a calendar, a clock, colours) is a window beside the page's: once it is
  // open, no frame comes any more. The field takes what is typed without it.
  const PICKERS = /^(color|date|datetime-local|month|time|week)$/;
  const opens = ({ type, key, altKey }) =>
    type === "click" || key === " " || key === "F4" || (altKey && /^Arrow(Up|Down)$/.test(key));
  for (const kind of ["click", "keydown"]) {
    addEventListener(kind, (event) => {
      const field = event.target;
      if (field instanceof HTMLInputElement && PICKERS.test(field.type) && opens(event)) {
        event.preventDefault();
      }
    }, true);
  }

  // A link opens a tab, a window or a file with these keys or the middle button: there is one page.
  for (const kind of ["click", "auxclick"]) {
    addEventListener(kind, (event) => {
      const keys = event.ctrlKey || event.metaKey || event.shiftKey || event.altKey;
      const link = event.target instanceof Element && event.target.closest("a[href]");
      if (link && (keys || event.button === 1)) event.preventDefault();
    }, true);
  }

  // Pages tell the console every reward, and the browser writes that into a log without a bound.
  for (const level of ["debug", "error", "info", "log", "warn"]) console[level] = () => {};

  window.alert = () => undefined;
  window.confirm = () => true;
  window.prompt = () => null;
  window.open = () => null;

  // --- what is pressed --------------------------------------------------------------------------

  // Which elements listen for presses: nothing else tells it of a page.
  const PRESSES = /^(click|dblclick|mousedown|mouseup|pointerdown|pointerup)$/;
  const listening = new WeakMap(); // element -> kinds
  const { addEventListener: listen, removeEventListener: forget } = EventTarget.prototype;
  EventTarget.prototype.addEventListener = function (kind, ...rest) {
    if (PRESSES.test(kind) && this instanceof Element) {
      listening.set(this, (listening.get(this) ?? new Set()).add(kind));
    }
    return listen.call(this, kind, ...rest);
  };
  EventTarget.prototype.removeEventListener = function (kind, ...rest) {
    if (PRESSES.test(kind)) listening.get(this)?.delete(kind);
    return forget.call(this, kind, ...rest);
  };
  const pressed = (element) => (listening.get(element)?.size ?? 0) > 0;

  // --- what is seen -----------------------------------------------------------------------------

  // Nothing of the harness (the cover that says START, rewards, past clicks), no motion that a
  // clock of its own drives, no blinking caret, and drop-down lists inside the page.
  const STYLE = `
    #sync-task-cover, #reward-display, #click-canvas { display: none !important; }
    *, *::before, *::after {
      transition: none !important; animation: none !important; caret-color: transparent !important;
    }
    select:not([multiple]):not([size]), ::picker(select) { appearance: base-select; }
    ::picker(select) { font-size: 10px; max-height: 110px; }
    select:not([multiple]):not([size]) option { min-block-size: 0; padding: 1px 4px; }
  `;
  addEventListener("DOMContentLoaded", () => {
    const style = document.createElement("style");
    style.textContent = STYLE;
    document.head.append(style);
  });

  // Images are waited for: how soon a file is read must not be seen.
  const kept = []; // keeps what style sheets name in the browser's cache
  const drawn = (image) => image.decode().catch(() => {}); // one that cannot be read is not waited for
  const images = () => Promise.all([...document.images].filter((each) => !each.complete).map(drawn));

  const preload = async () => {
    for (const sheet of document.styleSheets) {
      for (const rule of sheet.cssRules) {
        for (const [, address] of rule.cssText.matchAll(/url\("([^"]+)"\)/g)) {
          const image = new Image();
          image.src = new URL(address, sheet.href ?? location.href);
          kept.push(image);
        }
      }
    }
    await Promise.all([...kept.map(drawn), ...[...document.fonts].map((face) => face.load())]);
  };

  // --- the wheel ----------------------------------------------------------------------------------

  // The browser's own wheel scrolls when a later frame comes, so that what it does is done here:
  // whatever is nearest under the pointer and can be scrolled that way is.
  const wheel = (x, y, dx, dy) => {
    const over = document.elementFromPoint(x, y) ?? document.documentElement;
    const turn = { bubbles: true, cancelable: true, clientX: x, clientY: y, deltaX: dx, deltaY: dy };
    if (!over.dispatchEvent(new WheelEvent("wheel", turn))) return;
    for (let box = over; box; box = box.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(box);
      const root = box === document.scrollingElement;
      if (!root && !/auto|scroll/.test(`${overflowX} ${overflowY}`)) continue;
      const [left, top] = [box.scrollLeft, box.scrollTop];
      box.scrollBy({ left: dx, top: dy, behavior: "instant" });
      if (box.scrollLeft === left && box.scrollTop === top) continue;
      // Without a change of its style, the first scroll of a box is drawn two frames late.
      box.style.willChange = "scroll-position";
      return;
    }
  };

  // --- episodes -----------------------------------------------------------------------------------

  let playing = false; // false again in a page that a form or a link has led to

  const ready = () =>
    document.readyState === "complete" && typeof core !== "undefined" && core.cover_div !== null;

  const state = () => {
    if (!playing) return { playing, done: false, reward: 0, reason: "" };
    const reason = WOB_REWARD_REASON ? String(WOB_REWARD_REASON) : "";
    return { playing, done: WOB_DONE_GLOBAL, reward: Number(WOB_RAW_REWARD_GLOBAL), reason };
  };

  const pass = async (ms) => {
    tick(ms);
    await images();
    return state();
  };

  const start = async (seed, mode, ms) => {
    clipboard = "";
    document.activeElement?.blur();
    for (const each of document.querySelectorAll("*")) {
      if (each.scrollTop || each.scrollLeft) each.scrollTo({ left: 0, top: 0, behavior: "instant" });
    }
    if (core.EP_TIMER !== null) core.endEpisode(0);
    origin = now;
    core.setDataMode(mode);
    Math.seedrandom(seed);
    core.EPISODE_MAX_TIME = 1e12; // the number of steps is the limit, not the time
    core.startEpisodeReal();
    playing = true;
    const reached = await pass(ms);
    const told = core.getUtterance();
    return { instruction: typeof told === "object" ? told.utterance : String(told), ...reached };
  };

  Object.defineProperty(window, "dart", { value: { copied, pass, preload, pressed, ready, start, wheel } });
})();

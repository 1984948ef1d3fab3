// Runs in every document before its own scripts, with the seed of the episode: what differs from one
// machine, one run or one moment to the next, and what a screenshot would not show, is the same each time.
(seed) => {
  "use strict";

  // --- random numbers: mulberry32 --------------------------------------------------------------

  let state = (seed ^ 0x9e3779b9) >>> 0;
  Math.random = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };

  // --- what is seen: no motion, a caret that does not blink, lists inside the page ---------------

  const STYLE = `
    *, *::before, *::after {
      transition-duration: 1ms !important; transition-delay: 0s !important;
      animation-duration: 1ms !important; animation-delay: 0s !important;
      animation-iteration-count: 1 !important; scroll-behavior: auto !important;
      caret-animation: manual !important;
    }
    select:not([multiple]):not([size]), ::picker(select) { appearance: base-select !important; }
    ::picker(select) { max-height: 60vh; }
  `;
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(STYLE);
  const dress = (root) => {
    if (!root.adoptedStyleSheets.includes(sheet)) root.adoptedStyleSheets.push(sheet);
  };
  dress(document);
  const { attachShadow } = Element.prototype;
  Element.prototype.attachShadow = function (init) {
    const root = attachShadow.call(this, init);
    dress(root);
    return root;
  };

  // --- windows beside the page, after which no frame would come any more --------------------------

  const PICKERS = /^(color|date|datetime-local|month|time|week)$/;
  const opens = ({ type, key, altKey }) =>
    type !== "keydown" || key === " " || key === "Enter" || key === "F4" ||
    (altKey && /^Arrow(Up|Down)$/.test(key));
  for (const kind of ["mousedown", "click", "keydown"]) {
    addEventListener(kind, (event) => {
      const field = event.composedPath()[0];
      if (field instanceof HTMLSelectElement) dress(field.getRootNode());
      const picks = field instanceof HTMLInputElement && PICKERS.test(field.type);
      if (picks && kind !== "mousedown" && opens(event)) event.preventDefault();
    }, true);
  }
  HTMLInputElement.prototype.showPicker = () => {};
  addEventListener("contextmenu", (event) => event.preventDefault());
  window.print = () => {};

  // --- ways around the network of the named hosts -------------------------------------------------

  for (const name of ["RTCPeerConnection", "webkitRTCPeerConnection", "RTCDataChannel", "WebTransport"]) {
    delete window[name];
  }
}

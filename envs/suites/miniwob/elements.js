// The page as a tree for an explorer: `dartTree(scale, most)` is the root's node, of at most `most` nodes.
// A node is {role, name, box, acts, enabled, current, below}; box is in pixels of the screenshot, left
// and top first, or null where nothing of it can be seen. See envs/suites/miniwob/tree.py.
(() => {
  "use strict";

  const HARNESS = "#query, #sync-task-cover, #reward-display, #click-canvas";
  const SILENT = new Set(["SCRIPT", "STYLE", "TEMPLATE", "HEAD", "LINK", "META", "BR", "NOSCRIPT"]);
  const TAGS = {
    A: "link", BUTTON: "button", INPUT: "field", LI: "list item", OPTION: "option", SELECT: "combo",
    SUMMARY: "button", TEXTAREA: "field", TR: "table row", TD: "cell", TH: "cell", DIV: "area",
    SPAN: "area", SECTION: "area", P: "area", UL: "area", IMG: "image",
  };
  const INPUTS = {
    button: "button", checkbox: "checkbox", image: "button", radio: "radio", range: "slider",
    reset: "button", submit: "button",
  };
  const words = (text) => text.replace(/\s+/g, " ").trim();
  const ownText = (element) =>
    words([...element.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data).join(" "));

  // --- what it is -----------------------------------------------------------------------------------

  const roleOf = (element) => {
    const given = element.getAttribute("role");
    if (given && !/^(none|presentation)$/.test(given)) return given;
    if (element.tagName === "INPUT") return INPUTS[element.type] ?? "field";
    if (/^H[1-6]$/.test(element.tagName)) return "heading";
    const role = TAGS[element.tagName] ?? element.localName;
    return role === "area" && !words(element.textContent) ? "icon" : role;
  };

  // A picture's file says what it shows: .../left-arrow.png is "left arrow".
  const pictured = (element) => {
    const style = getComputedStyle(element);
    const shown = element.currentSrc || `${style.content} ${style.backgroundImage}`;
    const [, file] = shown.match(/([\w-]+)\.(?:png|gif|jpe?g|svg)\b/) ?? [];
    return file ? words(file.replace(/[-_]+/g, " ").replace(/ hover$/, "")) : "";
  };
  const nameOf = (element) => {
    const field = /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName);
    const pressed = /^(button|submit|reset)$/.test(element.type) && element.tagName === "INPUT";
    const labels = field && element.labels ? [...element.labels].map((each) => words(each.innerText)) : [];
    const texts = [
      element.getAttribute("aria-label"), ...labels, pressed && element.value,
      element.placeholder, element.alt, !field && words(element.innerText ?? element.textContent),
      element.title, element.dataset?.color, pictured(element),
      ...[...element.children].slice(0, 3).map(pictured),
    ];
    return texts.find((each) => each) || besideOf(element, field);
  };
  // The text around a field alone, or right before it, where no label is tied to it.
  const FIELDS = "input, select, textarea";
  const besideOf = (element, field) => {
    if (!field) return "";
    const short = (text) => (text.length <= 40 ? text : "");
    const plain = (around) => {
      const copy = around.cloneNode(true);
      for (const each of copy.querySelectorAll("button, a, option, script, style")) each.remove();
      return copy.matches("button, a, script, style") ? "" : words(copy.textContent);
    };
    for (let at = element; at.parentElement && at.id !== "area"; at = at.parentElement) {
      const around = at.parentElement;
      const alone = around.querySelectorAll(FIELDS).length === 1 && element.tagName !== "SELECT";
      const said = alone ? plain(around) : "";
      if (said) return short(said);
      for (let before = at.previousSibling; before; before = before.previousSibling) {
        if (before.nodeType === 1 && (before.matches(FIELDS) || before.querySelector(FIELDS))) return "";
        const text = before.nodeType === 1 ? plain(before) : words(before.data ?? "");
        if (text) return short(text);
      }
    }
    return "";
  };

  // --- where it is ----------------------------------------------------------------------------------

  const whole = () => ({ left: 0, top: 0, right: innerWidth, bottom: innerHeight });
  const cut = (box, frame) => ({
    left: Math.max(box.left, frame.left), top: Math.max(box.top, frame.top),
    right: Math.min(box.right, frame.right), bottom: Math.min(box.bottom, frame.bottom),
  });
  const pixels = ({ left, top, right, bottom }, scale) => {
    const box = [left, top, right, bottom].map((each) => Math.ceil(each * scale - 1e-6));
    return box[0] < box[2] && box[1] < box[3] ? box : null;
  };
  const clips = (element) => /auto|scroll|hidden|clip/.test(getComputedStyle(element).overflow);

  // What a click in the middle of a box reaches, the box in pixels of the screenshot.
  const reached = (box, scale) =>
    document.elementFromPoint(
      Math.floor((box[0] + box[2]) / 2) / scale, Math.floor((box[1] + box[3]) / 2) / scale,
    );

  // --- what can be done -----------------------------------------------------------------------------

  const NATIVE = "a[href], button, input, select, textarea, option, summary, [onclick], [contenteditable=true]";
  const TYPED = /^(INPUT|TEXTAREA)$/;
  const delegates = () => {
    const found = new Set();
    if (typeof jQuery === "undefined") return found;
    for (const element of document.querySelectorAll("body, body *")) {
      const events = jQuery._data(element, "events") ?? {};
      for (const { selector } of [...(events.click ?? []), ...(events.mousedown ?? [])]) {
        if (selector) for (const each of jQuery(element).find(selector)) found.add(each);
      }
    }
    return found;
  };
  // A container that listens for the parts within it only is not pressed itself.
  const listens = (element) => {
    if (element === document.body || element === document.documentElement) return false;
    if (!dart.pressed(element) && !element.onclick) return false;
    if (typeof jQuery === "undefined") return true;
    const { click, mousedown, mouseup } = jQuery._data(element, "events") ?? {};
    const bound = [...(click ?? []), ...(mousedown ?? []), ...(mouseup ?? [])];
    return bound.length === 0 || bound.some((each) => !each.selector);
  };

  const tree = (scale, most) => {
    const delegated = delegates();
    let count = 0;

    const pressable = (element) =>
      element.matches(NATIVE) || delegated.has(element) || listens(element);
    const scrolls = (element) => {
      if (element === document.scrollingElement) return element.scrollHeight > innerHeight + 1;
      if (element.scrollHeight <= element.clientHeight + 1) return false;
      return element.tagName === "TEXTAREA" || /auto|scroll/.test(getComputedStyle(element).overflowY);
    };
    // The nearest part around what a click reaches that does something with it.
    const answers = (element, box) => {
      for (let at = reached(box, scale); at; at = at.parentElement) {
        if (at === element) return true;
        if (pressable(at)) return false;
      }
      return false;
    };
    const boxOf = (element, frame) => {
      if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return null;
      return pixels(cut(element.getBoundingClientRect(), frame), scale);
    };
    // A link that goes over two lines: the part of it whose middle is its own.
    const pressedBox = (element, box, frame) => {
      const parts = [...element.getClientRects()].map((each) => pixels(cut(each, frame), scale));
      return [box, ...parts].find((each) => each && answers(element, each)) ?? null;
    };
    const isCurrent = (element) =>
      element.getAttribute("aria-selected") === "true" ||
      element.getAttribute("aria-expanded") === "true" ||
      (element.matches("select, details") && element.matches(":open"));

    // What is placed by itself, or in an open list, is not cut off by what is around it.
    const frameOf = (element, around) =>
      /absolute|fixed/.test(getComputedStyle(element).position) || element.tagName === "OPTION"
        ? whole()
        : around;

    const describe = (element, around) => {
      count += 1;
      const frame = frameOf(element, around);
      let box = boxOf(element, frame);
      const press = pressable(element);
      const enabled = !element.matches(":disabled, [aria-disabled=true], .ui-state-disabled");
      const acts = [];
      if (box && press) {
        const own = pressedBox(element, box, frame);
        if (own) acts.push("click");
        if (own && TYPED.test(element.tagName) && roleOf(element) === "field" && !element.readOnly) {
          acts.push("type");
        }
        box = own ?? box;
      }
      const moves = box && scrolls(element);
      if (moves) acts.push("scroll");
      const said = ownText(element);
      const known = /^(?!none|presentation)\w/.test(element.getAttribute("role") ?? "") || /^H[1-6]$/.test(element.tagName);
      let role = press || known || element.tagName === "IMG" ? roleOf(element) : "";
      if (!role && moves) role = "view";
      if (!role && said && box) role = "text";
      const inner = clips(element) && box ? cut(element.getBoundingClientRect(), frame) : frame;
      const below = [];
      for (const child of element.children) {
        if (count >= most || SILENT.has(child.tagName) || child.matches(HARNESS)) continue;
        below.push(describe(child, inner));
      }
      const name = role && role !== "view" ? nameOf(element).slice(0, 200) : "";
      return { role, name, box, acts, enabled, current: isCurrent(element), below };
    };
    return describe(document.documentElement, whole());
  };

  return tree;
})()

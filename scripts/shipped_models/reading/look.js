// What a page shows: `dartLook(scale)` is {glyphs, things, unread}, all places in pixels of the
// screenshot. A glyph is [character, x, y], its middle. A thing is {role, label, box, colour, shape, size,
// checked, value}. `unread` are boxes with text whose characters are not listed.
// Pages made for it say with data-r, data-n, data-c, data-s, data-z (role, label, colour, shape, size)
// what cannot be told from the elements themselves; data-r="-" leaves one out.
(() => {
  "use strict";

  const SILENT = "script, style, template, noscript, #sync-task-cover, #reward-display, #click-canvas";
  const words = (text) => (text ?? "").replace(/\s+/g, " ").trim();
  const whole = () => ({ left: 0, top: 0, right: Math.min(innerWidth, 160), bottom: Math.min(innerHeight, 210) });
  const cut = (box, frame) => ({
    left: Math.max(box.left, frame.left), top: Math.max(box.top, frame.top),
    right: Math.min(box.right, frame.right), bottom: Math.min(box.bottom, frame.bottom),
  });
  const within = (x, y, box) => x > box.left && x < box.right && y > box.top && y < box.bottom;
  const number = (text) => parseFloat(text) || 0;

  // --- what can be seen ---------------------------------------------------------------------------

  const makeFrames = () => {
    const known = new Map();
    // The part of the screen in which an element's contents can be seen.
    const inner = (element) => {
      if (!element || element === document.documentElement || element === document.body) return whole();
      if (known.has(element)) return known.get(element);
      const style = getComputedStyle(element);
      let frame = outer(element, style);
      const clips = /auto|scroll|hidden|clip/.test(style.overflow) || element.localName === "svg";
      if (clips && style.display !== "inline") frame = cut(element.getBoundingClientRect(), frame);
      known.set(element, frame);
      return frame;
    };
    const outer = (element, style) => {
      if (style.position === "fixed" || element.tagName === "OPTION") return whole();
      if (style.position === "absolute") return inner(element.offsetParent);
      return inner(element.parentElement);
    };
    return { inner, outer: (element) => outer(element, getComputedStyle(element)) };
  };

  const opaque = (element) => {
    if (/^(IMG|CANVAS|INPUT|TEXTAREA|SELECT|BUTTON)$/.test(element.tagName)) return true;
    const style = getComputedStyle(element);
    if (element.namespaceURI.endsWith("/svg")) return element.localName !== "svg" && style.fill !== "none";
    if (number(style.opacity) < 0.3) return false;
    return style.backgroundImage !== "none" || !/^(transparent|rgba\(.*, 0(\.\d)?\))$/.test(style.backgroundColor);
  };
  const related = (one, other) => one.contains(other) || other.contains(one);
  // Whether nothing opaque lies over the element there.
  const uncovered = (element, x, y) => {
    const top = document.elementFromPoint(x, y);
    if (!top) return false;
    if (element.tagName === "OPTION") return element.contains(top); // a list cuts off its options
    if (related(top, element)) return true;
    for (const each of document.elementsFromPoint(x, y)) {
      if (related(each, element)) return true;
      if (opaque(each)) return false;
    }
    return true;
  };
  const seen = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });

  // --- characters ---------------------------------------------------------------------------------

  const pen = document.createElement("canvas").getContext("2d");
  const turned = (text, style) => {
    if (style.textTransform === "uppercase") return text.toUpperCase();
    if (style.textTransform === "lowercase") return text.toLowerCase();
    if (style.textTransform === "capitalize") return text.replace(/(^|\s)\S/g, (found) => found.toUpperCase());
    return text;
  };

  const makeGlyphs = (frames) => {
    const glyphs = [];
    const unread = [];
    const add = (element, character, x, y, frame) => {
      if (character > " " && character <= "~" && within(x, y, frame) && uncovered(element, x, y)) {
        glyphs.push([character, x, y]);
      }
    };
    const range = document.createRange();
    const ofText = (node, element, frame, dx = 0, dy = 0) => {
      range.selectNodeContents(node);
      const around = range.getBoundingClientRect();
      if (!around.width || around.bottom + dy < frame.top || around.top + dy > frame.bottom) return false;
      const shown = turned(node.data, getComputedStyle(node.parentElement));
      for (let at = 0; at < node.length; at++) {
        if (node.data[at] <= " ") continue;
        range.setStart(node, at);
        range.setEnd(node, at + 1);
        const box = range.getClientRects()[0];
        if (!box || !box.width) continue;
        add(element, shown[at] ?? "", (box.left + box.right) / 2 + dx, (box.top + box.bottom) / 2 + dy, frame);
      }
      return true;
    };
    // One line in a box, placed as its style says.
    const ofLine = (element, text, style, align = style.textAlign) => {
      const box = element.getBoundingClientRect();
      const left = box.left + number(style.borderLeftWidth) + number(style.paddingLeft);
      const right = box.right - number(style.borderRightWidth) - number(style.paddingRight);
      const top = box.top + number(style.borderTopWidth) + number(style.paddingTop);
      const bottom = box.bottom - number(style.borderBottomWidth) - number(style.paddingBottom);
      pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
      const shown = turned(text, style);
      const wide = pen.measureText(shown).width;
      const room = right - left - wide;
      let start = left - (element.scrollLeft || 0);
      if (align === "center") start = left + Math.max(0, room / 2);
      if (/right|end/.test(align) && room > 0) start = left + room;
      const frame = cut({ left: left - 1, top: top - 3, right: right + 1, bottom: bottom + 3 }, frames.inner(element));
      let before = 0;
      for (let at = 0; at < shown.length; at++) {
        const after = pen.measureText(shown.slice(0, at + 1)).width;
        add(element, shown[at], start + (before + after) / 2, (top + bottom) / 2, frame);
        before = after;
      }
    };
    // Several lines of a textarea: laid out again in a block of the same style.
    const ofArea = (area) => {
      const text = area.value || area.placeholder;
      if (!text) return;
      const style = getComputedStyle(area);
      const box = area.getBoundingClientRect();
      const copy = document.createElement("div");
      for (const name of ["font", "padding", "border", "textAlign", "lineHeight", "letterSpacing", "wordSpacing"]) copy.style[name] = style[name];
      copy.style.boxSizing = "border-box";
      copy.style.whiteSpace = "pre-wrap";
      copy.style.overflowWrap = "break-word";
      copy.style.position = "fixed";
      copy.style.visibility = "hidden";
      copy.style.left = copy.style.top = "0";
      const bar = area.offsetWidth - area.clientWidth - number(style.borderLeftWidth) - number(style.borderRightWidth);
      copy.style.width = `${box.width - Math.max(0, bar)}px`;
      copy.textContent = text;
      document.body.append(copy);
      const from = copy.getBoundingClientRect();
      const frame = cut(box, frames.outer(area));
      range.selectNodeContents(copy.firstChild);
      const places = [];
      for (let at = 0; at < text.length; at++) {
        range.setStart(copy.firstChild, at);
        range.setEnd(copy.firstChild, at + 1);
        const one = range.getClientRects()[0];
        if (one) places.push([text[at], (one.left + one.right) / 2, (one.top + one.bottom) / 2]);
      }
      copy.remove();
      for (const [character, x, y] of places) {
        add(area, character, x + box.left - from.left - area.scrollLeft, y + box.top - from.top - area.scrollTop, frame);
      }
    };
    const ofField = (field) => {
      const style = getComputedStyle(field);
      if (field.tagName === "TEXTAREA") return ofArea(field);
      if (/^(button|submit|reset)$/.test(field.type)) return ofLine(field, field.value, style, "center");
      if (/^(checkbox|radio|range|color|file|image|hidden)$/.test(field.type)) return undefined;
      if (/^(date|time|month|week|datetime-local)$/.test(field.type)) {
        unread.push(cut(field.getBoundingClientRect(), frames.inner(field)));
        return undefined;
      }
      if (!field.value) return ofLine(field, field.placeholder ?? "", style);
      return field.type === "password" ? undefined : ofLine(field, field.value, style);
    };

    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, (node) => {
      if (node.nodeType === 3) return words(node.data) ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT;
      return node.matches(SILENT) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT;
    });
    while (walker.nextNode()) {
      const node = walker.currentNode;
      const element = node.nodeType === 3 ? node.parentElement : node;
      if (!seen(element)) continue;
      if (node.nodeType === 3) {
        if (element.closest("textarea, canvas")) continue;
        const drawn = ofText(node, element, frames.inner(element));
        if (!drawn && element.tagName === "OPTION" && element.getBoundingClientRect().width) {
          ofLine(element, words(node.data), getComputedStyle(element));
        }
      } else if (/^(INPUT|TEXTAREA)$/.test(node.tagName)) {
        ofField(node);
      } else if (node.tagName === "SELECT" && node.size <= 1 && !node.multiple) {
        ofLine(node, words(node.selectedOptions[0]?.text), getComputedStyle(node));
      } else if (/^(CANVAS|IFRAME)$/.test(node.tagName) || node.isContentEditable && !node.textContent) {
        unread.push(cut(node.getBoundingClientRect(), frames.inner(node)));
      }
    }
    return { glyphs, unread: unread.filter((box) => box.left < box.right && box.top < box.bottom) };
  };

  // --- things -------------------------------------------------------------------------------------

  // The names that pages of MiniWoB++ use, and brown.
  const COLOURS = {
    black: [0, 0, 0], white: [255, 255, 255], aqua: [0, 255, 255], blue: [0, 0, 255], gray: [128, 128, 128],
    green: [0, 128, 0], lime: [0, 255, 0], maroon: [128, 0, 0], navy: [0, 0, 128], olive: [128, 128, 0],
    purple: [128, 0, 128], red: [255, 0, 0], silver: [192, 192, 192], teal: [0, 128, 128], yellow: [255, 255, 0],
    pink: [255, 192, 203], magenta: [255, 0, 255], gold: [255, 215, 0], orange: [255, 165, 0], brown: [139, 69, 19],
  };
  const SAME = 48; // how far apart two colours of one name are, in RGB
  const colourOf = (said) => {
    const parts = (said.match(/[\d.]+/g) ?? []).map(Number);
    if (!said.startsWith("rgb") || (parts.length > 3 && parts[3] < 0.5)) return "";
    const far = (name) => Math.hypot(...COLOURS[name].map((each, at) => each - parts[at]));
    const [nearest] = Object.keys(COLOURS).sort((one, other) => far(one) - far(other));
    return far(nearest) <= SAME ? nearest : "";
  };

  const INPUTS = {
    button: "button", submit: "button", reset: "button", image: "button", checkbox: "checkbox",
    radio: "radio", range: "slider", hidden: "-",
  };
  const TAGS = {
    A: "link", BUTTON: "button", SELECT: "select", TEXTAREA: "field", OPTION: "option", LI: "row",
    TR: "row", TD: "cell", TH: "cell", IMG: "icon", SUMMARY: "section",
  };
  const ROLES = { tab: "tab", menuitem: "item", option: "option", slider: "slider", button: "button", link: "link", treeitem: "item" };
  const DRAWN = { circle: "circle", ellipse: "ellipse", rect: "rectangle", polygon: "polygon", line: "line", path: "path" };
  const ownText = (element) =>
    words([...element.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data).join(" "));

  const roleOf = (element) => {
    if (element.dataset?.r) return element.dataset.r;
    if (element.matches(".ui-icon, .ui-datepicker tr, .ui-datepicker-title span")) return "-";
    if (/^(TD|TH)$/.test(element.tagName) && element.querySelector("a, button, input, select")) return "-";
    if (element.matches(".ui-slider")) return "slider";
    if (element.matches(".ui-slider-handle, .ui-slider-range, .ui-tabs-anchor, .ui-menu-item, .ui-tabs-nav")) {
      return element.matches(".ui-tabs-anchor") ? "tab" : element.matches(".ui-menu-item") && !element.firstElementChild ? "item" : "-";
    }
    if (element.matches("li.ui-tab, li.ui-tabs-tab, li[role=tab]")) return "-";
    if (element.matches(".ui-accordion-header") && element.querySelector("button, input")) return "-";
    if (element.matches(".ui-accordion-header, .ui-menu-item-wrapper")) {
      return element.matches("h3, .ui-accordion-header") ? "section" : "item";
    }
    const given = ROLES[element.getAttribute("role")];
    if (given) return given;
    if (element.tagName === "INPUT") return INPUTS[element.type] ?? "field";
    if (/^H[1-6]$/.test(element.tagName)) return "heading";
    if (element.namespaceURI.endsWith("/svg")) {
      if (element.closest("button, a, .ql-toolbar")) return "-";
      if (element.localName === "text" || element.localName === "tspan") {
        return /^\w$/.test(words(element.textContent)) ? "shape" : words(ownText(element)) ? "text" : "-";
      }
      return DRAWN[element.localName] ? "shape" : "-";
    }
    if (element.tagName === "SELECT" && (element.size > 1 || element.multiple)) return "-";
    if (TAGS[element.tagName]) return TAGS[element.tagName];
    if (element.tagName === "LABEL" && element.control) return "-";
    const said = ownText(element);
    const style = getComputedStyle(element);
    const hand = style.cursor === "pointer";
    if (said && hand && style.textDecorationLine === "underline") return "link";
    if (said) return !hand ? "text" : getComputedStyle(element.parentElement).cursor === "pointer" ? "item" : "button";
    if (element.children.length) return "-";
    const painted = colourOf(style.backgroundColor);
    if (hand) return painted && painted !== "white" ? "shape" : "icon";
    if (pictured(element)) return "icon";
    if (dart.pressed(element) || element.onclick) return "tile";
    if (painted && !/white|gray|silver|black/.test(painted)) return "shape";
    return "-";
  };

  const pictured = (element) => {
    const style = getComputedStyle(element);
    const [, file] = `${element.currentSrc ?? ""} ${style.content} ${style.backgroundImage}`.match(/([\w-]+)\.(?:png|gif|jpe?g|svg)\b/) ?? [];
    return file ? words(file.replace(/[-_]+/g, " ").replace(/ hover$/, "")) : "";
  };
  // The text beside a field: its label, or what stands before it or after it in the same block.
  const beside = (field) => {
    const tied = [...(field.labels ?? [])].map((each) => words(each.innerText)).find(Boolean);
    if (tied) return tied;
    const ticked = /^(checkbox|radio)$/.test(field.type);
    for (let at = field; at.parentElement && at.id !== "area" && at !== document.body; at = at.parentElement) {
      const steps = ticked ? ["nextSibling", "previousSibling"] : ["previousSibling"];
      for (const step of steps) {
        for (let near = at[step]; near; near = near[step]) {
          if (near.nodeType === 1 && (near.matches("input, select, textarea") || near.querySelector("input, select, textarea"))) break;
          if (near.nodeType === 1 && (near.matches("button, a") || near.querySelector("button, a"))) break;
          const text = words(near.nodeType === 1 ? near.innerText : near.data);
          if (text) return text;
        }
      }
    }
    return field.placeholder ?? "";
  };
  const nameOf = (element, role) => {
    if (element.dataset?.n !== undefined) return element.dataset.n;
    if (/^(field|checkbox|radio|select|slider)$/.test(role)) return /^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName) ? beside(element) : "";
    if (element.tagName === "INPUT") return element.value;
    if (role === "text") return ownText(element);
    const said = words(element.innerText ?? element.textContent);
    if (said) return said;
    return words(element.getAttribute("aria-label") || element.alt || element.title || "") || element.dataset?.color || pictured(element) || [...element.children].slice(0, 3).map(pictured).find(Boolean) || "";
  };

  const shapeOf = (element, box) => {
    if (element.dataset?.s) return element.dataset.s;
    const [wide, high] = [box.right - box.left, box.bottom - box.top];
    const even = Math.abs(wide - high) <= 1.5;
    if (!element.namespaceURI.endsWith("/svg")) return even ? "square" : "rectangle";
    if (/^(text|tspan)$/.test(element.localName)) return /\d/.test(element.textContent) ? "digit" : "letter";
    if (element.localName === "rect") return even ? "square" : "rectangle";
    if (element.localName === "polygon") {
      return { 3: "triangle", 4: "rectangle", 5: "pentagon", 6: "hexagon" }[element.points.numberOfItems] ?? "polygon";
    }
    return DRAWN[element.localName] ?? "";
  };
  const paintOf = (element, role) => {
    if (element.dataset?.c) return element.dataset.c;
    const style = getComputedStyle(element);
    if (element.namespaceURI.endsWith("/svg")) {
      const said = element.getAttribute("fill");
      if (said in COLOURS) return said;
      return colourOf(style.fill) || colourOf(style.stroke);
    }
    if (element.dataset?.color in COLOURS) return element.dataset.color;
    const painted = colourOf(style.backgroundColor);
    if (role === "button") return /^(white|gray|silver)$/.test(painted) ? "" : painted;
    return role === "shape" ? painted : "";
  };

  const POINTS = [[0.5, 0.5], [0.25, 0.5], [0.75, 0.5], [0.5, 0.25], [0.5, 0.75]];
  const visibleBox = (element, frames) => {
    const frame = frames.outer(element);
    let best = null;
    const area = (box) => (box.right - box.left) * (box.bottom - box.top);
    for (const each of [...element.getClientRects()]) {
      const box = cut(each, frame);
      if (box.right - box.left < 2 || box.bottom - box.top < 2) continue;
      const open = POINTS.map(([across, down]) =>
        uncovered(element, box.left + across * (box.right - box.left), box.top + down * (box.bottom - box.top)));
      const reached = open[0] && open.filter(Boolean).length >= 4;
      if (reached && (!best || area(box) > area(best))) best = box;
    }
    return best;
  };

  const makeThings = (frames) => {
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
      if (element.closest(SILENT) || element.closest("#query") || !seen(element)) continue;
      const role = roleOf(element);
      if (role === "-") continue;
      const box = visibleBox(element, frames);
      if (!box) continue;
      const label = nameOf(element, role);
      if (label.length > 60 || (!label && /^(text|cell|row|item|link)$/.test(role))) continue;
      let value = "";
      if (role === "slider") value = String((typeof jQuery !== "undefined" && element.matches(".ui-slider") && jQuery(element).slider("value")) || element.value || element.dataset.v || "");
      else if (role === "select") value = words(element.selectedOptions?.[0]?.text);
      else if (role === "field" && element.type !== "password") value = element.value ?? "";
      else if (element.dataset?.v) value = element.dataset.v;
      const checked = /^(checkbox|radio)$/.test(role) ? Boolean(element.checked ?? element.dataset.v) : null;
      found.push({
        role, label, box, colour: paintOf(element, role), shape: role === "shape" ? shapeOf(element, box) : "",
        size: element.dataset?.z ?? "", checked, value,
      });
    }
    return found;
  };

  window.dartLook = (scale) => {
    const frames = makeFrames();
    const pixels = (box) => [box.left, box.top, box.right, box.bottom].map((each) => Math.round(each * scale * 10) / 10);
    const { glyphs, unread } = makeGlyphs(frames);
    const round = (each) => Math.round(each * scale * 10) / 10;
    return {
      glyphs: glyphs.map(([character, x, y]) => [character, round(x), round(y)]),
      things: makeThings(frames).map((each) => ({ ...each, box: pixels(each.box) })),
      unread: unread.map(pixels),
    };
  };
  return true;
})()

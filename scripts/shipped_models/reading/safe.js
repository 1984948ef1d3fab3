// Where a press does the same: `dartSafe(x, y, scale)` is the box around a point, in pixels of the
// screenshot, in which a click reaches what it reaches there; null where the place itself
// matters.
// `dartScrolls(scale)` are the boxes of what can be scrolled: [box, up, down, whether it is the
// page as a whole].
// `dartFocus()` tells whether a text field has the focus.
(() => {
  "use strict";

  const PLACES = "html, body, #wrap, #area, #query, svg, canvas, .ui-slider, .ui-slider *, input[type=range], " +
    "input[type=date], input[type=time]"; // a date's day, month and year are fields of their own
  const WHOLE = "button, a, label, input, select, option, textarea, h3, [role=button], [role=tab], .ui-menu-item-wrapper, .alink";
  const LARGE = 6000; // square CSS pixels: of what is larger and no control, the place may matter
  const cut = (box, frame) => ({
    left: Math.max(box.left, frame.left), top: Math.max(box.top, frame.top),
    right: Math.min(box.right, frame.right), bottom: Math.min(box.bottom, frame.bottom),
  });
  const screen = () => ({ left: 0, top: 0, right: Math.min(innerWidth, 160), bottom: Math.min(innerHeight, 210) });
  const pixels = (box, scale) => [box.left, box.top, box.right, box.bottom].map((each) => Math.round(each * scale * 10) / 10);
  const holds = (box, x, y) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;

  window.dartSafe = (across, down, scale) => {
    const [x, y] = [across / scale, down / scale];
    const deepest = document.elementFromPoint(x, y);
    if (!deepest || deepest.matches(PLACES)) return null;
    const element = deepest.closest(WHOLE) ?? deepest;
    const around = [...element.getClientRects()].find((each) => holds(each, x, y)) ?? deepest.getBoundingClientRect();
    let box = cut(around, screen());
    if (!holds(box, x, y)) return null;
    if (!element.matches(WHOLE) && (box.right - box.left) * (box.bottom - box.top) > LARGE) return null;
    const same = (left, top) => element.contains(document.elementFromPoint(left, top));
    for (let share = 1; share > 0.15; share -= 0.1) {
      const inner = {
        left: x + (box.left - x) * share + 1, top: y + (box.top - y) * share + 1,
        right: x + (box.right - x) * share - 1, bottom: y + (box.bottom - y) * share - 1,
      };
      const [middle, level] = [(inner.left + inner.right) / 2, (inner.top + inner.bottom) / 2];
      if (inner.right - inner.left < 1 || inner.bottom - inner.top < 1) break;
      const places = [
        [inner.left, inner.top], [inner.right, inner.top], [inner.left, inner.bottom], [inner.right, inner.bottom],
        [middle, inner.top], [middle, inner.bottom], [inner.left, level], [inner.right, level],
      ];
      if (places.every(([left, top]) => same(left, top))) return pixels(inner, scale);
    }
    return null;
  };

  window.dartScrolls = (scale) => {
    const found = [];
    for (const each of document.querySelectorAll("body, #wrap *, .ui-dialog *, .ui-menu")) {
      const root = each === document.body;
      const tall = root ? document.scrollingElement : each;
      if (!root && !/auto|scroll/.test(getComputedStyle(each).overflowY) && each.tagName !== "TEXTAREA") continue;
      if (tall.scrollHeight <= (root ? innerHeight : each.clientHeight) + 2) continue;
      const box = cut(root ? screen() : each.getBoundingClientRect(), screen());
      const [wide, high] = [box.right - box.left, box.bottom - box.top];
      if (wide < 8 || high < 8) continue;
      const inner = { left: box.left + wide / 6, top: box.top + high / 6, right: box.right - wide / 6, bottom: box.bottom - high / 6 };
      const below = tall.scrollTop + (root ? innerHeight : each.clientHeight) < tall.scrollHeight - 1;
      found.push([pixels(inner, scale), tall.scrollTop > 0, below, root]);
    }
    return found;
  };

  window.dartFocus = () => {
    const field = document.activeElement;
    return Boolean(field && (field.tagName === "TEXTAREA" || field.isContentEditable ||
      (field.tagName === "INPUT" && !/^(button|submit|reset|checkbox|radio|range|image|color)$/.test(field.type))));
  };
  return true;
})()

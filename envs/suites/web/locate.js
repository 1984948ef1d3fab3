// A JavaScript expression: a function that returns where to act on an element. Of the elements that match
// `selector`, also in open shadow roots, and have the text or label `text` (null: any), it takes the one of
// number `nth` that can be seen.
(selector, text, nth) => {
  const roots = (root) => {
    const inner = [...root.querySelectorAll("*")].filter((each) => each.shadowRoot);
    return [root, ...inner.flatMap((each) => roots(each.shadowRoot))];
  };
  const plain = (value) => (value ?? "").replace(/\s+/g, " ").trim();
  const labels = (each) => [
    each.innerText, each.getAttribute("aria-label"), each.getAttribute("title"), each.getAttribute("alt"),
    each.getAttribute("placeholder"), each instanceof HTMLInputElement ? each.value : null,
    ...[...(each.labels ?? [])].map((label) => label.innerText),
  ].map(plain);
  const all = roots(document).flatMap((root) => [...root.querySelectorAll(selector)]);
  const named = text === null ? all : all.filter((each) => labels(each).includes(plain(text)));
  const shown = named.filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && each.checkVisibility({ visibilityProperty: true });
  });
  const target = shown[nth];
  if (!target) return { matches: all.length, named: named.length, shown: shown.length };
  const middle = (box) => [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  const [x, y] = middle(target.getBoundingClientRect());
  // The boxes through which it is seen, from the inside to the window: the first that hides it must scroll.
  const frames = [];
  for (let box = target.parentElement ?? target.getRootNode().host; box;
       box = box.parentElement ?? box.getRootNode().host) {
    const { overflowX, overflowY } = getComputedStyle(box);
    if (box !== document.scrollingElement && /auto|scroll/.test(`${overflowX} ${overflowY}`)) {
      frames.push(box.getBoundingClientRect());
    }
  }
  frames.push(new DOMRect(0, 0, innerWidth, innerHeight));
  for (const frame of frames) {
    const dx = x < frame.left ? x - frame.left - 40 : x >= frame.right ? x - frame.right + 40 : 0;
    const dy = y < frame.top ? y - frame.top - 40 : y >= frame.bottom ? y - frame.bottom + 40 : 0;
    if (dx || dy) {
      const [left, top] = [Math.max(frame.left, 0), Math.max(frame.top, 0)];
      const [right, bottom] = [Math.min(frame.right, innerWidth), Math.min(frame.bottom, innerHeight)];
      return { x: (left + right) / 2, y: (top + bottom) / 2, scroll: [dx, dy] };
    }
  }
  return { x, y };
}

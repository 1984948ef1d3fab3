// Solvers of tasks: `dartOracle(page)` is the next action of a solution from the page's present
// state, in CSS pixels, or null where the page has no solver. No solver keeps a state of its own.
// `dartWidgets()` is what can be pressed on pages that are made of buttons, links, fields, boxes.
(() => {
  "use strict";

  // --- looking ------------------------------------------------------------------------------------

  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const text = (element) => element.textContent.replace(/\s+/g, " ").trim();
  const query = () => text(one("#query"));
  const told = (pattern) => (query().match(pattern) ?? []).slice(1);
  const quoted = (index = 0) => [...query().matchAll(/"([^"]*)"/g)][index]?.[1];
  const by = (selector, wanted, root) => all(selector, root).find((each) => text(each) === wanted);
  const shown = (element) => element !== undefined && element.checkVisibility();
  const has = (element) => document.activeElement === element;

  // A point at which a click would reach the element: its middle, or wherever it is uncovered.
  const point = (element) => {
    const reaches = (x, y) => element.contains(document.elementFromPoint(x, y));
    for (const box of element.getClientRects()) {
      const [x, y] = [box.left + box.width / 2, box.top + box.height / 2].map(Math.round);
      if (reaches(x, y)) return [x, y];
      for (let row = Math.ceil(box.top); row < box.bottom; row += 2) {
        for (let column = Math.ceil(box.left); column < box.right; column += 2) {
          if (reaches(column, row)) return [column, row];
        }
      }
    }
    return null;
  };

  // --- acting -------------------------------------------------------------------------------------

  const keys = (...names) => ({ kind: "keypress", keys: names });
  const wait = (seconds) => ({ kind: "wait", seconds });
  const drag = (...path) => ({ kind: "drag", path: path.map((each) => each.map(Math.round)) });

  // Turn the wheel over whatever scrolls around the element, so that the element comes into view.
  const reveal = (element) => {
    const { top, height } = element.getBoundingClientRect();
    for (let box = element.parentElement; box; box = box.parentElement) {
      const root = box === document.scrollingElement;
      if (!root && !/auto|scroll/.test(getComputedStyle(box).overflowY)) continue;
      if (box.scrollHeight <= box.clientHeight + 1) continue;
      const frame = root ? { left: 0, top: 0, width: 160, height: 210 } : box.getBoundingClientRect();
      const over = Math.min(frame.top + frame.height / 2, 205);
      const notches = Math.round((top + height / 2 - over) / 50);
      const dy = notches || Math.sign(top + height / 2 - over);
      const x = Math.round(frame.left + frame.width / 2);
      return { kind: "scroll", x, y: Math.round(over), dx: 0, dy };
    }
    throw new Error(`nothing scrolls to ${element.outerHTML.slice(0, 80)}`);
  };

  const press = (element) => {
    if (!element) throw new Error("the page does not hold what the oracle looks for");
    const at = point(element);
    return at ? { kind: "click", x: at[0], y: at[1] } : reveal(element);
  };
  const hover = (element) => ({ ...press(element), kind: "move" });

  // Bring a text field to hold `value`; null when it does.
  const write = (field, value) => {
    const wanted = String(value);
    if (field.value === wanted) return null;
    if (!has(field)) return press(field);
    const whole = field.selectionStart === 0 && field.selectionEnd === field.value.length;
    if (field.value && !whole) return keys("ctrl", "a");
    return { kind: "type", text: wanted };
  };
  const tick = (box, wanted = true) => (box.checked === wanted ? null : press(box));

  // Bring a jQuery UI slider to `value`: a click on its track, or a drag where its handle is in the
  // way, and arrow keys for the last bit.
  const slide = (track, value) => {
    const $track = $(track);
    const now = $track.slider("value");
    if (now === value) return null;
    const handle = one(".ui-slider-handle", track);
    if (has(handle) && Math.abs(value - now) <= 3) return keys(value > now ? "right" : "left");
    const [least, most] = ["min", "max"].map((name) => $track.slider("option", name));
    const upright = $track.slider("option", "orientation") === "vertical";
    const box = track.getBoundingClientRect();
    const inside = (at, from, to) => Math.round(Math.min(Math.max(at, from + 1), to - 1));
    const place = (each) => {
      const share = (each - least) / (most - least);
      return upright
        ? [Math.round(box.left + box.width / 2), inside(box.bottom - share * box.height, box.top, box.bottom)]
        : [inside(box.left + share * box.width, box.left, box.right), Math.round(box.top + box.height / 2)];
    };
    const aim = place(value);
    const covered = handle.contains(document.elementFromPoint(...aim));
    if (covered && has(handle)) return drag(place(now), aim);
    return { kind: "click", x: aim[0], y: aim[1] };
  };

  const submit = () => press(one("#subbtn") ?? by("button", "Submit") ?? one("#submit"));
  const position = () => parseInt(told(/(\d+)(?:st|nd|rd|th)/)[0], 10);

  // --- families of tasks --------------------------------------------------------------------------

  const button = () => press(by("#area button", quoted()));
  const names = () => told(/Select (.*) and click Submit/)[0].split(", ");
  const boxes = () => {
    const wanted = names();
    for (const label of all("#area label")) {
      const act = tick(one("input", label), wanted.includes(text(label)));
      if (act) return act;
    }
    return submit();
  };
  const field = (selector, value) => write(one(selector), value) ?? submit();
  const section = () => {
    const header = one("#area h3");
    return shown(header.nextElementSibling) ? submit() : press(header);
  };
  const linkIn = (open) => {
    const links = all("#area .alink").filter((each) => text(each) === quoted());
    const link = links.find(shown) ?? links[0];
    if (!link) return press(by("#area a", "Tab #2")); // it is on a tab that the page leaves empty
    return shown(link) ? press(link) : press(open(link));
  };
  const header = (link) => link.closest(".ui-accordion-content").previousElementSibling;
  const tab = (link) => one(`#area a[href="#${link.closest(".ui-tabs-panel").id}"]`);
  const moved = (shape, way) => {
    const [from, to] = [shape.getBBox(), shapes.gridCoords(shape)];
    return { up: to.y < from.y, down: to.y > from.y, left: to.x < from.x, right: to.x > from.x }[way];
  };
  const shift = (shape) => {
    const [way] = told(/ (up|down|left|right) then/);
    if (moved(shape, way)) return submit();
    const [x, y] = point(shape);
    const step = { up: [0, -15], down: [0, 15], left: [-15, 0], right: [15, 0] }[way];
    return drag([x, y], [x + step[0], y + step[1]]);
  };
  const toItem = (items, from, to) => {
    const [start, end] = [point(items[from]), point(items[to])];
    const over = [0, 1].map((axis) => end[axis] + 3 * Math.sign(end[axis] - start[axis]));
    return drag(start, over, over);
  };
  const months = "January February March April May June July August September October November December";
  const date = () => {
    const [month, day, year] = told(/(\d+)\/(\d+)\/(\d+)/).map(Number);
    const box = one("#datepicker");
    if (box.value.split("/").map(Number).join() === [month, day, year].join()) return submit();
    if (!shown(one("#ui-datepicker-div"))) return press(box);
    const now = months.split(" ").indexOf(text(one(".ui-datepicker-month"))) + 1;
    if (now !== month) return press(one(now < month ? ".ui-datepicker-next" : ".ui-datepicker-prev"));
    return press(by(".ui-datepicker-calendar a", String(day)));
  };
  const mail = (name) => all("#main .email-thread").find((each) => text(one(".email-sender", each)) === name);
  const letter = () => {
    const [name] = told(/by (\S+)/);
    if (/delete it/.test(query())) return press(one(".trash", mail(name)));
    if (/as important/.test(query())) return press(one(".star", mail(name)));
    const answer = one("#reply-text");
    if (answer) return write(answer, quoted()) ?? press(one("#send-reply"));
    const receiver = one(".forward-sender");
    if (receiver) {
      return write(receiver, told(/to (\S+)\.$/)[0]) ?? press(one("#send-forward"));
    }
    if (!one("#email")) return press(mail(name));
    return press(one(/reply/.test(query()) ? ".email-reply" : ".email-forward"));
  };
  const highlight = (paragraph) => {
    const bare = (value) => value.replace(/\s/g, "");
    if (bare(String(getSelection())) === bare(paragraph.textContent)) return submit();
    const range = document.createRange();
    range.selectNodeContents(paragraph);
    const lines = [...range.getClientRects()].filter((box) => box.width > 0);
    const [first, last] = [lines[0], lines[lines.length - 1]];
    const end = [Math.min(last.right + 4, 159), last.top + last.height / 2];
    return drag([Math.max(first.left, 0), first.top + first.height / 2], end);
  };
  const complete = () => {
    const box = one("#tags");
    const [start, end] = [quoted(0), quoted(1) ?? ""];
    const wanted = ui_utils.COUNTRIES.find((each) => each.startsWith(start) && each.endsWith(end));
    const act = write(box, wanted);
    if (act) return act;
    return shown(one(".ui-autocomplete")) ? keys("escape") : submit();
  };
  const copy = (source) => {
    const target = one("#answer-input");
    if (target.value === source.value.replace(/\n/g, "")) return submit();
    if (dart.copied() === source.value) return has(target) ? keys("ctrl", "v") : press(target);
    if (!has(source)) return press(source);
    const whole = source.selectionStart === 0 && source.selectionEnd === source.value.length;
    return whole ? keys("ctrl", "c") : keys("ctrl", "a");
  };
  const arithmetic = () => {
    const [a, sign, b] = text(one("#math-problem")).match(/(\d+) ([-+x]) (\d+)/).slice(1);
    return { "+": +a + +b, "-": a - b, x: a * b }[sign];
  };
  const algebra = () => {
    const [a, sign, b, sum] = text(one("#math-problem")).match(/(\w+) ([-+]) (\w+) = (\d+)/).slice(1);
    if (sign === "+") return sum - (a === "x" ? b : a);
    return a === "x" ? +sum + +b : a - sum;
  };

  // --- one solver for each page ---------------------------------------------------------------------

  const solvers = {
    "ascending-numbers": () => {
      const rank = (each) => Number(each.dataset.index ?? text(each));
      const marks = all("#area_svg text").concat(all("#area_svg rect[data-index]"));
      return press(marks.sort((a, b) => rank(a) - rank(b))[0]);
    },
    "button-delay": () => {
      if (buttonsPushed.length === 0) return press(one("#subbtn"));
      const left = timeDelay - (Date.now() - currentTime) / 1000;
      return left > 0.01 ? wait(left) : press(one("#subbtn2"));
    },
    "buy-ticket": () => {
      const [most, what] = told(/the (cheapest|shortest|longest|most expensive) (cost|duration)/);
      const value = (each) =>
        what === "cost"
          ? Number(one(".buy-ticket", each).dataset.price)
          : Number(one(".time-duration", each).dataset.duration);
      const sorted = all(".flight").sort((a, b) => value(a) - value(b));
      const high = most === "longest" || most === "most expensive";
      return press(one(".buy-ticket", high ? sorted[sorted.length - 1] : sorted[0]));
    },
    "choose-date": date,
    "choose-date-easy": date,
    "choose-date-medium": date,
    "choose-date-nodelay": date,
    "choose-list": () => {
      const list = one("#options");
      const [wanted] = told(/Select (.*) from the list/);
      if (list.value === wanted) return submit();
      return list.matches(":open") ? press(by("#options option", wanted)) : press(list);
    },
    "click-button": button,
    "click-button-sequence": () => press(one(buttonsPushed.length === 0 ? "#subbtn" : "#subbtn2")),
    "click-checkboxes": boxes,
    "click-checkboxes-large": boxes,
    "click-checkboxes-transfer": boxes,
    "click-collapsible": section,
    "click-collapsible-nodelay": section,
    "click-collapsible-2": () => linkIn(header),
    "click-collapsible-2-nodelay": () => linkIn(header),
    "click-color": () => {
      const [wanted] = core.getUtterance().match(/the (\w+) colored/).slice(1);
      return press(one(`#area [data-color="${wanted}"]`));
    },
    "click-dialog": () => press(one(".ui-dialog-titlebar button")),
    "click-dialog-2": () => {
      const wanted = quoted();
      return press(wanted === "x" ? one(".ui-dialog-titlebar button") : by(".ui-dialog button", wanted));
    },
    "click-link": () => press(by(".alink", quoted())),
    "click-menu": () => {
      let items = all("#menu > li");
      for (const name of told(/Select (.*)$/)[0].split(">")) {
        const item = items.find((each) => text(each.firstElementChild) === name);
        const below = one(":scope > ul", item);
        if (!below) return press(item.firstElementChild);
        if (!shown(below)) return hover(item.firstElementChild);
        items = [...below.children];
      }
      throw new Error("the menu has no such entry");
    },
    "click-menu-2": () => {
      if (!shown(one("#menu"))) return press(one("#open-menu"));
      const icon = one("#query .ui-icon")?.className;
      const items = all("#menu .ui-menu-item > div");
      const item = items.find((each) =>
        icon ? one(".ui-icon", each)?.classList.contains(icon.split(" ")[1]) : text(each) === quoted(1));
      if (shown(item)) return press(item);
      return hover(items.find((each) => text(each) === "Playback"));
    },
    "click-option": () => {
      const label = by("#boxes label", names()[0]);
      return tick(one("input", label)) ?? submit();
    },
    "click-shades": () => {
      const [wanted] = told(/shades of (\w+)/);
      const left = all(`#area span[data-color="${wanted}"]`).find((each) => each.className !== "selected");
      return left ? press(left) : submit();
    },
    "click-scroll-list": () => {
      const wanted = told(/Select (.*) from the scroll list/)[0].split(", ");
      const wrong = all("#options option").find((each) => each.selected !== wanted.includes(text(each)));
      if (!wrong) return submit();
      const way = press(wrong);
      return way.kind === "click" ? { ...way, modifiers: ["ctrl"] } : way;
    },
    "click-tab": () => press(by("#area a", told(/on (Tab #\d)/)[0])),
    "click-tab-2": () => linkIn(tab),
    "click-tab-2-easy": () => linkIn(tab),
    "click-tab-2-medium": () => linkIn(tab),
    "click-tab-2-hard": () => linkIn(tab),
    "click-test": () => press(one("#subbtn")),
    "click-test-2": () => press(by("#area button", "ONE")),
    "click-test-transfer": () => press(by("#area button", "ONE")),
    "click-widget": () => press(one(`#area [data-type="${quoted()}"]`)),
    "copy-paste": () => copy(one("#to-copy")),
    "copy-paste-2": () => copy(one(`#text-${position()}`)),
    "drag-box": () => {
      if (smallBoxContained()) return submit();
      const [small, large] = ["#draggableSmall", "#draggableLarge"].map((each) => one(each));
      const middle = (each) => {
        const box = each.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
      };
      const [held, aim] = point(small) ? [small, large] : [large, small];
      const [from, to, at] = [middle(held), middle(aim), point(held)];
      return drag(at, [at[0] + to[0] - from[0], at[1] + to[1] - from[1]]);
    },
    "drag-circle": () => shift(one("svg circle")),
    "drag-single-shape": () => shift(one(".black-shape")),
    "drag-items": () => {
      const items = all("#sortable li");
      const [name, place] = told(/Drag (\S+) (.*)\.$/);
      const from = items.findIndex((each) => text(each) === name);
      const nth = Number((place.match(/(\d+)/) ?? [])[1]) - 1;
      const to = { "to the top": 0, "to the bottom": 4, "down by one position": from + 1,
        "up by one position": from - 1 }[place] ?? nth;
      return toItem(items, from, to);
    },
    "drag-items-grid": () => {
      const items = all("#sortable li");
      const [name, place] = told(/Drag (\S+) (.*)\.$/);
      const from = items.findIndex((each) => text(each) === name);
      const step = { "up by one": -3, "down by one": 3, "left by one": -1, "right by one": 1 }[place];
      const places = ["top left", "top center", "top right", "center left", "center", "center right",
        "bottom left", "bottom center", "bottom right"];
      return toItem(items, from, step ? from + step : places.indexOf(place.replace("to the ", "")));
    },
    "drag-shapes": () => {
      const [wanted] = told(/all (rectangles|circles|triangles)/);
      const tag = HTML_TAGS[SHAPE_TYPES.indexOf(wanted)];
      const shape = all(`#area_svg ${tag}`).find((each) => !insideContainer(each));
      if (!shape) return submit();
      const box = one("#shape-container").getBoundingClientRect();
      const at = point(shape);
      return drag(at, [box.left + box.width / 2, box.top + box.height / 2]);
    },
    "drag-sort-numbers": () => {
      const items = all("#sortable li");
      const values = items.map((each) => parseInt(text(each), 10));
      const sorted = [...values].sort((a, b) => a - b);
      const to = values.findIndex((each, index) => each !== sorted[index]);
      return to < 0 ? submit() : toItem(items, values.indexOf(sorted[to], to + 1), to);
    },
    "email-inbox": letter,
    "email-inbox-delete": letter,
    "email-inbox-forward": letter,
    "email-inbox-important": letter,
    "email-inbox-noscroll": letter,
    "email-inbox-reply": letter,
    "enter-date": () => {
      const box = one("#tt");
      const [month, day, year] = told(/(\d+)\/(\d+)\/(\d+)/);
      if (box.value === `${year}-${month}-${day}`) return submit();
      if (has(box)) return { kind: "type", text: `${month}${day}${year}` };
      const { left, top, height } = box.getBoundingClientRect();
      return { kind: "click", x: Math.round(left + 8), y: Math.round(top + height / 2) };
    },
    "enter-time": () => {
      const box = one("#tt");
      const [hour, minute, half] = told(/(\d+):(\d+)\s?(AM|PM)/);
      const hours = (Number(hour) % 12) + (half === "PM" ? 12 : 0);
      if (box.value === `${String(hours).padStart(2, "0")}:${minute}`) return submit();
      if (has(box)) return { kind: "type", text: `${hour.padStart(2, "0")}${minute}${half}` };
      const { left, top, height } = box.getBoundingClientRect();
      return { kind: "click", x: Math.round(left + 8), y: Math.round(top + height / 2) };
    },
    "enter-password": () =>
      write(one("#password"), quoted()) ?? write(one("#verify"), quoted()) ?? submit(),
    "enter-text": () => field("#tt", quoted()),
    "enter-text-2": () =>
      field("#tt", /upper case/.test(query()) ? quoted().toUpperCase() : quoted().toLowerCase()),
    "enter-text-dynamic": () => field("#tt", quoted()),
    "find-greatest": () => {
      const cards = all("#cardholder .card");
      const value = (each) => Number(one(".card-value", each).textContent);
      const best = cards.reduce((a, b) => (value(b) > value(a) ? b : a));
      return best.classList.contains("hidden") ? press(best) : press(one("#submit"));
    },
    "find-word": () => {
      const words = text(one("#area p")).split(" ");
      return field("#answer-input", words[position() - 1].replace(/[^a-zA-Z]+/g, ""));
    },
    "focus-text": () => press(one("#tt")),
    "focus-text-2": () => press(one(`#tt${position()}`)),
    "form-sequence": () =>
      slide(one("#slider"), Number(told(/Select (-?\d+)/)[0])) ??
      tick(one(`#checkbox-${position()}`)) ?? submit(),
    "form-sequence-2": () => {
      const [radio, value, box] = told(/the (\d)\w+ radio.*"(-?\d+)" into the (\d)/);
      return tick(one(`#area input[type=radio][value="${radio}"]`)) ??
        write(one(`#input-${box}`), value) ?? submit();
    },
    "grid-coordinate": () => press(document.getElementById(told(/coordinate (\S+)\.$/)[0])),
    "guess-number": () => {
      const bound = (name) => (shown(one(name)) ? Number(text(one(`${name} span`))) : null);
      const [more, less] = [bound("#higher"), bound("#lower")];
      const guess = more !== null ? more + 1 : less !== null ? less - 1 : 5;
      const box = one("#tt");
      if (Number(box.value) === guess && box.value !== "") return submit();
      if (!has(box)) return press(box);
      if (box.value && String(getSelection()) !== box.value) return keys("ctrl", "a");
      return { kind: "type", text: String(guess) };
    },
    "highlight-text": () => highlight(one("#randomText")),
    "highlight-text-2": () => highlight(all("#randomText p")[position() - 1]),
    "login-user": () =>
      write(one("#username"), quoted(0)) ?? write(one("#password"), quoted(1)) ?? submit(),
    "multi-orderings": () => {
      const [genre, name, year] = told(/for (.*) movies directed by (.*) from year (\d+)/);
      const box = (label) => one("input", by("#area th", label).parentElement);
      return write(box("Genre"), genre) ?? write(box("Director"), name) ??
        write(box("Year"), year) ?? press(one("#area .final"));
    },
    "navigate-tree": () => {
      const items = all("#tree span").filter((each) => text(each) === quoted());
      const item = items.find(shown) ?? items[0];
      if (shown(item)) return press(item);
      let closed = item.parentElement;
      while (!shown(closed)) closed = closed.parentElement.closest("li");
      return press(one("span", closed));
    },
    "number-checkboxes": () => {
      const wanted = PATTERNS[Number(quoted())].flat();
      const marks = all("#checkboxes input[type=checkbox]");
      const wrong = marks.find((each, index) => each.checked !== (wanted[index] === 1));
      return wrong ? press(wrong) : submit();
    },
    "odd-or-even": () => {
      for (const row of all("#numbers .row")) {
        const odd = Number(text(one(".display-number", row))) % 2 !== 0;
        const choice = one(odd ? ".odd" : ".even", row);
        if (!choice.classList.contains("selected")) return press(choice);
      }
      return press(one("#submit"));
    },
    "order-food": () => {
      const order = one("#submit-order button");
      const count = (each) => Number(each.dataset.quantity);
      const [listed] = told(/each item: (.*)$/);
      if (listed) {
        const wanted = listed.split(", ").map((each) => each.trim());
        const missing = all(".food-item").find(
          (each) => wanted.includes(each.dataset.item.trim()) && count(each) === 0);
        return press(missing ? one(".add", missing) : order);
      }
      const [number, kind] = told(/Order (\d) items that are (.*)$/);
      const fits = all(".food-item").find((each) => one(`img[alt="${kind}"]`, each));
      return press(count(fits) < Number(number) ? one(".add", fits) : order);
    },
    "phone-book": () => {
      const [name, what] = told(/Find (\S+) in .* their (\w+)/);
      if (text(one("#contact .name")) === name) return press(one(`#contact a.${what}`));
      return press(by("#pagination a", ">"));
    },
    "read-table": () => {
      const cell = by("#tab td", told(/value of (.*) into/)[0]);
      return field("#tt", text(cell.nextElementSibling));
    },
    "read-table-2": () => {
      for (const side of [1, 2]) {
        const cell = by("#tab td", one(`#ll${side}`).dataset.key);
        const act = write(one(`#tt${side}`), text(cell.nextElementSibling));
        if (act) return act;
      }
      return submit();
    },
    "resize-textarea": () => {
      const [what, way] = told(/the (height|width) is (larger|smaller)/);
      // Pages begin at multiples of 5; 12 pixels further it is none.
      if (Math.round($("#tt")[what]()) % 5 !== 0) return press(one("#submit"));
      const at = point(one(".ui-resizable-se"));
      const by12 = way === "larger" ? 12 : -12;
      return drag(at, what === "width" ? [at[0] + by12, at[1]] : [at[0], at[1] + by12]);
    },
    "scroll-text": () => {
      const words = text(one("#text-area")).split(" ");
      return field("#answer-input", words[words.length - 1].replace(/[^a-zA-Z0-9]/g, ""));
    },
    "scroll-text-2": () => {
      const area = one("#text-area");
      const down = /bottom/.test(query());
      const left = down ? area.scrollHeight - area.offsetHeight - area.scrollTop : area.scrollTop;
      if (left < 8) return submit();
      const [x, y] = point(area);
      return { kind: "scroll", x, y, dx: 0, dy: (down ? 1 : -1) * Math.ceil(left / 50) };
    },
    "search-engine": () => {
      const links = all("#page-content a");
      if (links.length === 0) return write(one("#search-text"), quoted()) ?? press(one("#search"));
      const link = one(`#page-content a[data-result="${position() - 1}"]`);
      return press(link ?? by("#pagination a", String(Math.ceil(position() / 3))));
    },
    "simple-algebra": () => field("#math-answer", algebra()),
    "simple-arithmetic": () => field("#math-answer", arithmetic()),
    "social-media": () => {
      const [user] = told(/user (@\S+), click/);
      const label = quoted();
      const post = all(".media").find((each) => text(one(".username", each)) === user);
      const name = Object.keys(ACTIONS).find((each) => ACTIONS[each] === label);
      const item = one(`.controls .${name}`, post);
      return shown(item) ? press(item) : press(one(".more", post));
    },
    "text-transform": () => field("#tt", one("#captcha").textContent),
    "unicode-test": button,
    "use-autocomplete": complete,
    "use-autocomplete-nodelay": complete,
    "use-slider": () => slide(one("#slider"), Number(told(/Select (-?\d+)/)[0])) ?? submit(),
    "use-slider-2": () => {
      const wanted = JSON.parse(told(/(\[.*\])/)[0]);
      for (const index of [0, 1, 2]) {
        const act = slide(one(`#slider-${index + 1}`), wanted[index]);
        if (act) return act;
      }
      return submit();
    },
    "use-spinner": () => {
      const [wanted] = told(/Select (-?\d+)/).map(Number);
      const now = Number(one("#spinner").value);
      if (now === wanted) return submit();
      return press(one(now < wanted ? ".ui-spinner-up" : ".ui-spinner-down"));
    },
    "visual-addition": () => field("#math-answer", all(".addition-block").length),
  };

  // What can be pressed and is not covered: its kind, its colour or text, its box in CSS pixels.
  const PRESSED = `button, input, textarea, select, #area a, h3, circle, .color, #area > span[data-color],
    .ttt-row span, .ui-dialog-titlebar-close`;
  const widgets = () =>
    all(PRESSED).flatMap((element) => {
      const { left, top, right, bottom } = element.getBoundingClientRect();
      const [x, y] = [(left + right) / 2, (top + bottom) / 2].map(Math.round);
      if (!element.contains(document.elementFromPoint(x, y))) return [];
      const label = element.dataset?.color ?? text(element);
      return [{ role: element.localName, label, box: [left, top, right, bottom] }];
    });

  window.dartWidgets = widgets;
  window.dartOracleParts = {
    all, one, told, text, query, quoted, press, keys, write, drag, wait, solvers,
  }; // for oracle_drawing.js and oracle_forms.js
  window.dartOracle = (page) => (Object.hasOwn(solvers, page) ? solvers[page]() : null);
})();

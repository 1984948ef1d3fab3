// Solvers of tasks with forms, lists and posts: loaded after oracle.js, whose parts they use.
(() => {
  "use strict";

  const { all, one, told, text, query, quoted, press, keys, write, drag, solvers } =
    window.dartOracleParts;

  // The text before or behind a field, whatever the page's layout is.
  const label = (field) => {
    let box = field.parentElement;
    while (!text(box)) box = box.parentElement;
    return text(box);
  };

  // Press the button of that kind on `count` posts of the user, on all of them without a count.
  const posts = (count) => () => {
    const wanted = quoted();
    const [user] = told(/by (@\S+?)\.? and then/);
    const kind = Object.keys(ACTIONS).find((each) => ACTIONS[each] === wanted);
    const found = all(".media").filter((each) => text(one(".username", each)) === user);
    const buttons = found.map((each) => one(`.${kind}`, each));
    const pressed = buttons.filter((each) => each.classList.contains("active"));
    if (pressed.length === (count ? Number(told(/on (\d+) post/)[0]) : buttons.length)) {
      return press(one("#submitRow button"));
    }
    return press(buttons.find((each) => !pressed.includes(each)));
  };

  // The picker covers the button until its field has lost the focus.
  const pick = (hex) =>
    write(one("#col"), hex) ??
    press(one(document.activeElement === one("#col") ? "#query" : "#subbtn"));

  // The shapes that a description such as "large red item" fits: size, colour, kind, each may be left out.
  const described = (description) => {
    const kinds = { circle: "circle", polygon: "triangle", rect: "rectangle" };
    return all("#area_svg > *").filter((each) => {
      const glyph = each.localName === "text" ? text(each) : null;
      const height = glyph ? parseFloat(each.getAttribute("font-size")) : each.getBBox().height;
      const words = [
        height > 15 ? "large" : "small", each.getAttribute("fill"), "item", glyph ?? kinds[each.localName],
        glyph === null ? "shape" : /\d/.test(glyph) ? "digit" : "letter",
      ];
      return description.split(" ").every((word) => words.includes(word));
    });
  };

  const pie = () => {
    const part = (kind) => all(`#divWheel svg [id^="wheelnav-divWheel-${kind}"]`);
    const [spreader] = part("spreader");
    if (part("slice")[0].getBoundingClientRect().width < 10) return press(spreader);
    return press(part("slice")[part("title").findIndex((each) => text(each) === quoted())]);
  };

  Object.assign(solvers, {
    "click-pie": pie,
    "click-pie-nodelay": pie,
    "click-shape": () => press(described(told(/Click on an? (.*)$/)[0])[0]),
    "count-shape": () => {
      const count = described(told(/How many (.*)s are there/)[0]).length;
      return press(all("#count-buttons button").find((each) => text(each) === String(count)));
    },
    "drag-shapes-2": () => {
      const [name] = told(/all (\S+)/);
      const shapes = all("svg circle, svg polygon, svg rect:not(#shape-container)").filter(
        (each) => each.getAttribute("fill") !== "none");
      const kinds = { rectangles: "rect", circles: "circle", triangles: "polygon" };
      const left = (each) => kinds[name] === each.localName || each.getAttribute("fill") === name;
      const frame = one("svg").getBoundingClientRect();
      const moved = shapes.find((each) =>
        left(each) ? !insideContainer(each, LEFT_BOX_X, LEFT_BOX_Y)
          : !insideContainer(each, RIGHT_BOX_X, RIGHT_BOX_Y));
      if (!moved) return press(one("#subbtn"));
      const { left: x, top: y, width, height } = moved.getBoundingClientRect();
      const to = left(moved) ? LEFT_BOX_X : RIGHT_BOX_X;
      return drag([x + width / 2, y + height / 2], [frame.left + to + 30, frame.top + LEFT_BOX_Y + 25]);
    },
    "email-inbox-star-reply": () => solvers["email-inbox"](),
    "form-sequence-3": () => {
      const [wanted, button] = told(/Choose (.*) from the dropdown, .* labeled "(.*)"/);
      if (one("#dropdown").value === wanted) return press(all("#buttons button").find((each) => text(each) === button));
      const item = all(".selectric-items li").find((each) => text(each) === wanted);
      return press(item?.checkVisibility() && one(".selectric-open") ? item : one(".selectric"));
    },
    "identify-shape": () => {
      const shape = one("#area_svg").lastElementChild;
      const kind = { rect: "rectangle", circle: "circle", polygon: "triangle" }[shape.localName];
      return press(one(`[data-type="${kind ?? (/\d/.test(text(shape)) ? "digit" : "letter")}"]`));
    },
    "login-user-popup": () => (one("#popup") ? press(one("#popup-cancel")) : solvers["login-user"]()),
    "multi-layouts": () => {
      const [genre, name, year] = told(/for (.*) movies directed by (.*) from year (\d+)/);
      for (const field of all("#area input[type=text]")) {
        const said = label(field);
        const value = /genre/i.test(said) ? genre : /director/i.test(said) ? name : year;
        const act = write(field, value);
        if (act) return act;
      }
      return press(one("#area button, #area .final, #area .ui-submit"));
    },
    "sign-agreement": () => {
      const [cancel, agree, area] = ["#cancel", "#agree", "#text-area"].map((each) => one(each));
      if (/^Click the cancel/.test(query())) return press(cancel);
      if (agree.disabled) {
        const { left, top, width, height } = area.getBoundingClientRect();
        const far = area.scrollHeight - area.scrollTop - area.clientHeight;
        const at = { x: Math.round(left + width / 2), y: Math.round(top + height / 2) };
        return { kind: "scroll", ...at, dx: 0, dy: Math.max(1, Math.ceil(far / 50)) };
      }
      return write(one("#name"), quoted()) ?? press(quoted(1) === "Agree" ? agree : cancel);
    },
    "social-media-all": posts(false),
    "social-media-some": posts(true),
    terminal: () => {
      const typed = one("#active-input").textContent;
      const ending = told(/extension (\.\S+)$/)?.[0];
      const file = currentFiles.find((each) => (ending ? each.endsWith(ending) : !each.includes(".")));
      if (typed === `rm ${file}`) return keys("enter");
      if (typed) return keys("backspace");
      if (document.activeElement !== one("#terminal-target")) return press(one("#terminal"));
      return { kind: "type", text: `rm ${file}` };
    },
    "use-colorwheel": () =>
      pick(ui_utils.colorNameToHex(told(/Select (\S+) with/)[0]).slice(1).toUpperCase()),
    "use-colorwheel-2": () => {
      const parts = getComputedStyle(one("#query .cc")).backgroundColor.match(/\d+/g).slice(0, 3);
      return pick(parts.map((each) => Number(each).toString(16).padStart(2, "0")).join("").toUpperCase());
    },
  });
})();

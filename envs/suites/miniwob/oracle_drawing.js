// Solvers of tasks in which something is drawn, or moves: loaded after oracle.js, whose parts they use.
(() => {
  "use strict";

  const { all, one, told, text, press, drag, wait, solvers } = window.dartOracleParts;
  const click = ([x, y]) => ({ kind: "click", x, y });
  const box = (element) => element.getBoundingClientRect();
  const middle = (element) => {
    const { left, top, width, height } = box(element);
    return [left + width / 2, top + height / 2];
  };

  // --- one point in a drawing ---------------------------------------------------------------------

  // The pixel of the drawing with the highest score; the score is given the point as the page's own
  // circle would have it, in its coordinates.
  const best = (score, radius) => {
    const frame = box(one("svg"));
    let [found, most] = [null, -Infinity];
    for (let y = Math.ceil(frame.top); y < frame.bottom; y++) {
      for (let x = Math.ceil(frame.left); x < frame.right; x++) {
        const reached = score({ x: x - radius, y: y - 50 - radius });
        if (!(reached > most)) continue;
        if (!one("svg").contains(document.elementFromPoint(x, y))) continue;
        [found, most] = [[x, y], reached];
      }
    }
    return [found, most];
  };

  // Click the best pixel; submit once the point of the page is as good.
  const place = (score, radius) => {
    const [at, most] = best(score, radius);
    const drawn = one("#blue-circle");
    return drawn && score(drawn.getBBox()) >= most - 1e-9 ? press(one("#subbtn")) : click(at);
  };
  const near = (to) => (at) => -Math.hypot(at.x - to.x, at.y - to.y);

  // --- a path -------------------------------------------------------------------------------------

  const drawn = (path) => (one("path") ? press(one("#controls button")) : drag(...path));

  Object.assign(solvers, {
    "bisect-angle": () => {
      const [start, end] = all(".init-black").map((each) => each.getBBox());
      const corner = one(".init-blue").getBBox();
      const whole = findAngle(start, end, corner);
      return place((at) => {
        const wider = Math.max(findAngle(start, at, corner), findAngle(end, at, corner));
        return wider > whole ? -360 : -wider;
      }, 3.5);
    },
    "circle-center": () => {
      const { x, y, width, height } = one(".black-circle").getBBox();
      return place(near({ x: x + width / 2 - 3, y: y + height / 2 - 3 }), 3.5);
    },
    "draw-circle": () => {
      const [x, y] = middle(one("#circ"));
      const round = (turn) => [x - 25 * Math.cos(turn), y - 25 * Math.sin(turn)];
      return drawn([...Array(17).keys()].map((each) => round((each * Math.PI) / 8)));
    },
    "draw-line": () => {
      const [x, y] = middle(one("svg circle"));
      const across = /horizontal/.test(told(/(horizontal|vertical)/)[0]);
      const frame = box(one("svg"));
      const low = across ? Math.max(frame.left + 2, x - 40) : Math.max(frame.top + 2, y - 40);
      const high = across ? Math.min(frame.right - 2, x + 40) : Math.min(frame.bottom - 2, y + 40);
      return drawn(across ? [[low, y], [high, y]] : [[x, low], [x, high]]);
    },
    "find-midpoint": () => {
      const [a, b] = all(".black-circle").map((each) => each.getBBox());
      return place(near({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 }), 3.5);
    },
    "right-angle": () => {
      const [end, corner] = ["#init-black", "#init-blue"].map((each) => one(each).getBBox());
      return place((at) => -Math.abs(90 - findAngle(end, at, corner)), 3);
    },

    // --- what moves or comes by chance --------------------------------------------------------------

    "generate-number": () => {
      const shown = text(one("#display-number"));
      const number = Number(shown);
      const [kind, bound] = told(/(less than|greater than|odd|even) ?(-?\d+)?/);
      const fits = {
        "less than": number < Number(bound), "greater than": number > Number(bound),
        odd: number % 2 === 1, even: number % 2 === 0,
      }[kind];
      return press(one(shown !== "-" && fits ? "#submit" : "#generate"));
    },
    "moving-items": () => {
      const frame = box(one("#area_svg"));
      const inside = (at, from, to) => Math.round(Math.min(Math.max(at, from + 1), to - 1));
      const seen = all(".item")
        .map((each) => ({ each, at: middle(each) }))
        .filter(({ at: [x, y] }) => x > frame.left - 16 && x < frame.right + 16 &&
          y > frame.top - 16 && y < frame.bottom + 16);
      if (seen.length === 0) return wait(0.5);
      const [x, y] = seen.sort((a, b) => a.each.id.localeCompare(b.each.id))[0].at; // set out first
      return click([inside(x, frame.left, frame.right), inside(y, frame.top, frame.bottom)]);
    },
    "stock-market": () => {
      const price = Number(text(one("#stock-price")).slice(1) || Infinity);
      return price <= Number(told(/\$([\d.]+\d)/)[0]) ? press(one("#buy")) : wait(0.5);
    },
  });
})();

// Once a page is drawn: what the browser drew in each figure, before and after each of its switches, is left in the
// document as JSON. `faults` is kept from before the page's own scripts; see browser.py.
addEventListener("load", async () => {
  const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));
  while (document.documentElement.dataset.drawn !== "yes" && faults.length === 0) await pause(20);
  const plots = [...document.querySelectorAll(".plot")];

  // Whether any of it can be seen: it has a size, lies inside the axes and is painted in something.
  const painted = (mark, area) => {
    const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
    const inside = box.left <= area.right && box.right >= area.left && box.top <= area.bottom && box.bottom >= area.top;
    const ink = (colour, opacity) => colour !== "none" && !/^rgba.*, 0\)$/.test(colour) && Number(opacity) > 0;
    const inked = mark.localName === "image" || ink(style.fill, style.fillOpacity)
      || (ink(style.stroke, style.strokeOpacity) && parseFloat(style.strokeWidth) > 0);
    const shown = mark.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
    return inside && inked && shown && box.width + box.height > 0;
  };

  // Of each trace its data, and the places of its drawn points and error bars, read off the axes by their pixels.
  const look = plot => {
    const groups = [...plot.querySelectorAll("g.trace, g.hm")];
    return plot.data.map((trace, index) => {
      const names = [trace.xaxis || "x", trace.yaxis || "y"];
      const drag = plot.querySelector(`.nsewdrag[data-subplot="${names.join("")}"]`);
      const [across, up] = names.map(name => plot._fullLayout[name.replace(/^(.)/, "$1axis")].range);
      const width = drag.getAttribute("width"), height = drag.getAttribute("height");
      const right = x => across[0] + x / width * (across[1] - across[0]);
      const above = y => up[1] + y / height * (up[0] - up[1]);
      const own = groups.filter(group => group.__data__[0].trace.index === index);
      const all = what => own.flatMap(group => [...group.querySelectorAll(what)]);
      const place = mark => {
        const moved = /translate\(([-\d.]+),([-\d.]+)\)/.exec(mark.getAttribute("transform"));
        const box = mark.getBBox();
        return moved ? [right(Number(moved[1])), above(Number(moved[2]))] : [right(box.x + box.width), above(box.y)];
      };
      const error = trace.error_x || {}, area = drag.getBoundingClientRect();
      return {
        variant: trace.legendgroup, label: trace.meta, name: trace.name,
        visible: trace.visible, symbol: trace.marker && trace.marker.symbol, axis: names[0],
        x: trace.x, y: trace.y, plus: error.array, minus: error.symmetric === false ? error.arrayminus : error.array,
        marks: all(".points path, .js-line, .js-fill, .xerror, image").filter(mark => painted(mark, area)).length,
        points: all(".points path").map(place),
        errors: all(".xerror").map(mark => mark.getBBox()).map(box => [right(box.x), right(box.x + box.width)]),
        pixel: [Math.abs(across[1] - across[0]) / width, Math.abs(up[1] - up[0]) / height],
      };
    });
  };
  const shapes = plot => {
    const area = plot.querySelector(".nsewdrag").getBoundingClientRect(), [from, to] = plot._fullLayout.xaxis.range;
    const value = x => from + (x - area.left) / area.width * (to - from);
    return [...plot.querySelectorAll(".shapelayer path")].map(mark => mark.getBoundingClientRect())
      .map(box => [value(box.left), value(box.right)]);
  };
  const each = what => Object.fromEntries(plots.map(plot => [plot.id, what(plot)]));

  const seen = { drawn: each(look), shapes: each(shapes) };
  seen.labels = each(plot => plot.querySelectorAll("g.annotation").length);
  seen.width = [document.documentElement.scrollWidth, innerWidth];
  // Figures, and texts outside the boxes that scroll by themselves, that reach beyond the right edge.
  seen.beyond = [...document.querySelectorAll(".main-svg, main > *, .verdicts *, li, p, figcaption, summary")]
    .filter(element => element.getBoundingClientRect().right > innerWidth + 0.5)
    .map(element => `${element.localName}.${element.getAttribute("class")}: ${element.textContent.slice(0, 40)}`);
  seen.tables = [...document.querySelectorAll("table")]
    .map(table => [...table.rows].map(row => [...row.cells].map(cell => cell.innerText)));
  // What a pointer over the first mark of each figure is told.
  seen.hovered = {};
  for (const plot of plots) {
    const mark = plot.querySelector(".points path"), line = plot.querySelector(".js-line");
    const box = (mark || plot.querySelector(".nsewdrag")).getBoundingClientRect();
    const middle = { x: box.left + box.width / 2, y: box.top + box.height / 2 };
    const { x, y } = mark || !line ? middle : line.getPointAtLength(0).matrixTransform(line.getScreenCTM());
    const at = { clientX: x, clientY: y, bubbles: true };
    plot.querySelector(".nsewdrag").dispatchEvent(new MouseEvent("mousemove", at));
    await pause(150);
    seen.hovered[plot.id] = [...plot.querySelectorAll(".hoverlayer .hovertext, .hoverlayer .legend text")]
      .map(label => label.textContent);
  }
  seen.titles = {};
  seen.switched = {};
  for (const input of document.querySelectorAll("input[type=radio]")) {
    input.click();
    await pause(50);
    const plot = document.getElementById(input.dataset.figure);
    seen.titles[input.id] = [plot.layout.xaxis.title.text, plot.layout.yaxis.title.text, plot.layout.xaxis.type];
    seen.switched[input.id] = look(plot);
  }
  const button = document.querySelector(".legend button[data-name=RAALL]");
  if (button) {
    button.click();
    await pause(200);
    const left = trace => trace.variant === "RAALL" && (trace.visible || trace.marks);
    seen.left = plots.filter(plot => look(plot).some(left)).map(plot => plot.id);
    seen.pressed = button.getAttribute("aria-pressed");
  }
  seen.faults = faults;
  const said = "SEEN" + JSON.stringify(seen) + "NEES";
  if (parent !== window) parent.postMessage(said, "*");
  document.documentElement.innerHTML = "";
  document.documentElement.textContent = said;
});

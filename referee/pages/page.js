// Draw the figures of the page. A figure is plain data: {data, layout, choices, narrow}; see referee/pages/html_page.py.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set(); // names that the reader switched off
  const narrow = matchMedia("(max-width: 640px)");
  const schemes = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");

  // A color between two of the page: "mix(--v1, --v5, 0.25)" is a quarter of the way to --v5.
  const mixed = ([, first, second, share], style) => "#" + [1, 3, 5].map(place => {
    const [a, b] = [first, second].map(name => parseInt(style.getPropertyValue(name).trim().slice(place, place + 2), 16));
    return Math.round(a + Number(share) * (b - a)).toString(16).padStart(2, "0");
  }).join("");

  // Replace "var(--v1)" and "var(--v1, 0.2)" by colors of the page, so that figures follow light, dark and print.
  const resolveColors = (value, style) => {
    if (typeof value === "string") {
      const mix = /^mix\((--[\w-]+), (--[\w-]+), ([\d.]+)\)$/.exec(value);
      if (mix) return mixed(mix, style);
      const found = /^var\((--[\w-]+)(?:, ([\d.]+))?\)$/.exec(value);
      if (!found) return value;
      const alpha = found[2] === undefined ? 255 : Math.round(255 * Number(found[2]));
      return style.getPropertyValue(found[1]).trim() + alpha.toString(16).padStart(2, "0");
    }
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(item => resolveColors(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolveColors(item, style)]));
    }
    return value;
  };

  const merge = (base, patch) => {
    if (!patch || typeof patch !== "object" || Array.isArray(patch)) return patch === undefined ? base : patch;
    const result = base && typeof base === "object" && !Array.isArray(base) ? { ...base } : {};
    for (const [key, value] of Object.entries(patch)) result[key] = merge(result[key], value);
    return result;
  };

  const axisDefaults = () => ({
    gridcolor: "var(--line)", linecolor: "var(--line)", zerolinecolor: "var(--line)", tickcolor: "var(--line)",
    automargin: false, tickfont: { size: 12, color: "var(--soft)" }, title: { standoff: 8, font: { size: 12, color: "var(--soft)" } },
  });

  const withChoices = (spec, chosen) => {
    let data = spec.data, layout = spec.layout;
    spec.choices.forEach((choice, number) => {
      const option = choice.options[chosen[number]];
      if (option.data) data = data.map((trace, index) => merge(trace, option.data[index] || {}));
      layout = merge(layout, option.layout || {});
    });
    if (narrow.matches) layout = merge(layout, spec.narrow);
    data = data.map(trace => ({ ...trace, visible: trace.visible !== false && !hidden.has(trace.legendgroup) }));
    const full = merge({
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "var(--ink)" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: narrow.matches ? false : "zoom",
      hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--line)", font: { color: "var(--ink)" }, namelength: -1 },
    }, merge({ xaxis: {}, yaxis: {} }, layout));
    for (const key of Object.keys(full).filter(key => /^[xy]axis\d*$/.test(key))) full[key] = merge(axisDefaults(), full[key]);
    return resolveColors({ data, layout: full }, getComputedStyle(document.documentElement));
  };

  // Names at the ends of lines, moved apart until they are readable. Heights are fractions of the plot's height.
  const endLabels = (plot, drawn) => {
    const axis = plot.layout.yaxis, margin = drawn.layout.margin;
    const height = drawn.layout.height - margin.t - margin.b;
    const at = value => ((axis.type === "log" ? Math.log10(value) : value) - axis.range[0]) / (axis.range[1] - axis.range[0]);
    const ends = drawn.data.filter(trace => trace.visible && trace.meta && trace.y.length)
      .map(trace => ({ text: trace.meta, color: trace.line.color, y: at(trace.y[trace.y.length - 1]) }))
      .filter(end => end.y >= 0 && end.y <= 1).sort((a, b) => a.y - b.y);
    const step = Math.min(15 / height, 1 / Math.max(1, ends.length - 1));
    for (let pass = 0; pass < 100; pass += 1) {
      for (let i = 1; i < ends.length; i += 1) {
        const missing = step - (ends[i].y - ends[i - 1].y);
        if (missing > 1e-6) { ends[i].y += missing / 2; ends[i - 1].y -= missing / 2; }
      }
      ends.forEach((end, i) => { end.y = Math.min(1 - (ends.length - 1 - i) * step, Math.max(i * step, end.y)); });
    }
    return ends.map(end => ({
      text: end.text, font: { color: end.color, size: 12 }, xref: "paper", yref: "paper", x: 1, y: end.y,
      xanchor: "left", yanchor: "middle", xshift: 6, showarrow: false,
    }));
  };

  const chosen = {};
  const draw = async name => {
    const plot = document.getElementById(name), spec = figures[name];
    if (!plot) return;
    const drawn = withChoices(spec, chosen[name]);
    const annotations = drawn.layout.annotations || [];
    await Plotly.react(plot, drawn.data, { ...drawn.layout, annotations }, { displayModeBar: false, responsive: true });
    if (!spec.data.some(trace => trace.meta)) return;
    const relabel = () => Plotly.relayout(plot, { annotations: [...annotations, ...endLabels(plot, drawn)] });
    plot.removeAllListeners("plotly_relayout");
    await relabel();
    plot.on("plotly_relayout", change => { if (!("annotations" in change)) relabel(); });
  };
  const drawAll = () => Promise.all(Object.keys(figures).map(draw));

  for (const name of Object.keys(figures)) chosen[name] = figures[name].choices.map(() => 0);
  document.querySelectorAll("[data-choice]").forEach(input => input.addEventListener("change", () => {
    chosen[input.dataset.figure][Number(input.dataset.choice)] = Number(input.value);
    draw(input.dataset.figure);
  }));
  document.querySelectorAll(".legend button").forEach(button => button.addEventListener("click", () => {
    const name = button.dataset.name, shown = hidden.delete(name);
    if (!shown) hidden.add(name);
    button.setAttribute("aria-pressed", String(shown));
    drawAll();
  }));
  for (const query of [schemes, narrow, print]) query.addEventListener("change", drawAll);
  const finish = () => {
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // plotly measures texts with it
    document.documentElement.dataset.drawn = "yes";
  };
  if (typeof Plotly !== "undefined") drawAll().then(finish);
})();

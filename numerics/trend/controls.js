// Part 3 of the page's script: the chosen cell, zoom, keys, switches, and the tables. Texts are set as text, never as HTML.

// ---- the chosen cell

const cellText = (number, at) => {
  const steps = kind.starts[at] === kind.ends[at] ? `step ${kind.starts[at]}` : `steps ${kind.starts[at]} to ${kind.ends[at]}`;
  const values = panels.map(({ map, name }) => {
    const place = number * kind.starts.length + at, most = map.most[place], least = map.least[place];
    const value = !least || most === least ? text(map, most) : `${text(map, least)} to ${text(map, most)}`;
    return panels.length > 1 ? `${name} ${value}` : value;
  });
  const here = data.anomalies.filter(one => one.kind === kind.kind && one.rank === rank && one.name === kind.names[number]
    && one.step >= kind.starts[at] && one.step <= kind.ends[at]);
  return `${kind.names[number]}, ${steps}: ${statistic} ${values.join("; ")}${here.length ? `. Anomaly: ${here[0].text}` : ""}`;
};

const choose = (number, at) => {
  row = Math.max(0, Math.min(kind.names.length - 1, number));
  column = Math.max(0, Math.min(kind.starts.length - 1, at));
  const step = kind.starts[column], size = to - from;
  if (step < from || step >= to) {
    const begin = Math.max(kind.starts[0], Math.min(kind.ends[kind.ends.length - 1] + 1 - size, Math.round(step - size / 2)));
    [from, to] = [begin, begin + size];
  }
  where.textContent = cellText(row, column);
  draw();
};

const columnAt = step => {
  let low = 0, high = kind.starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (kind.starts[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
};

const setView = (begin, end) => {
  const first = kind.starts[0], last = kind.ends[kind.ends.length - 1] + 1;
  const size = Math.max(Math.min(8, last - first), Math.min(last - first, Math.round(end - begin)));
  from = Math.max(first, Math.min(last - size, Math.round(begin)));
  to = from + size;
  draw();
};
const zoom = factor => {
  const center = column >= 0 ? kind.starts[column] : (from + to) / 2, size = (to - from) * factor;
  setView(center - size / 2, center + size / 2);
};

const at = (panel, event) => {
  const box = panel.canvas.getBoundingClientRect(), x = event.clientX - box.left;
  const step = from + (x - panel.gutter) / (box.width - panel.gutter) * (to - from);
  return { x, step, row: Math.floor((event.clientY - box.top) / rowHeight()) };
};

const listen = panel => {
  const canvas = panel.canvas;
  canvas.addEventListener("pointerdown", event => {
    const place = at(panel, event);
    drag = { panel, from: place.x, to: place.x, begin: place.step };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    const place = at(panel, event);
    if (drag) { drag.to = place.x; draw(); return; }
    if (place.row >= 0 && place.row < kind.names.length && place.x >= panel.gutter) where.textContent = cellText(place.row, columnAt(place.step));
  });
  canvas.addEventListener("pointerup", event => {
    const place = at(panel, event), start = drag;
    drag = null;
    if (!start) return;
    if (Math.abs(start.to - start.from) > 3) setView(Math.min(start.begin, place.step), Math.max(start.begin, place.step));
    else if (place.row >= 0 && place.row < kind.names.length) choose(place.row, columnAt(place.step));
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("dblclick", () => setView(-Infinity, Infinity));
};

let shownAnomaly = -1;
const toAnomaly = async number => {
  if (!data.anomalies.length) return;
  shownAnomaly = (number + data.anomalies.length) % data.anomalies.length;
  const one = data.anomalies[shownAnomaly];
  await change(one.kind, one.statistic, one.rank);
  choose(kind.names.indexOf(one.name), columnAt(one.step));
};

maps.addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const many = Math.max(1, Math.round(kind.starts.length / 20));
  const moves = {
    ArrowRight: () => choose(Math.max(row, 0), column + 1),
    ArrowLeft: () => choose(Math.max(row, 0), column - 1),
    ArrowDown: () => choose(row + 1, column),
    ArrowUp: () => choose(row - 1, column),
    PageDown: () => choose(Math.max(row, 0), column + many),
    PageUp: () => choose(Math.max(row, 0), column - many),
    Home: () => choose(Math.max(row, 0), 0),
    End: () => choose(Math.max(row, 0), kind.starts.length - 1),
    "+": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => setView(-Infinity, Infinity),
    n: () => toAnomaly(shownAnomaly + 1),
    p: () => toAnomaly(shownAnomaly - 1),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  moves[event.key]();
});

// ---- switches

const select = (label, options, chosen, use) => make("label", {}, label, make("select", { id: `choose-${label}`, onchange: event => use(event.target.value) },
  ...options.map(([value, name]) => make("option", { value, selected: String(value) === String(chosen) ? "" : null }, name))));

const toolbar = () => {
  const statistics = [...new Set(kind.maps.map(map => map.statistic))], ranks = [...new Set(kind.maps.map(map => map.rank))];
  byId("tools").replaceChildren(
    select("kind", data.kinds.map(one => [one.kind, one.kind]), kind.kind, value => change(value, statistic, rank)),
    select("statistic", statistics.map(one => [one, one]), statistic, value => change(kind.kind, value, rank)),
    ranks.length > 1 ? select("rank", ranks.map(one => [one, one]), rank, value => change(kind.kind, statistic, Number(value))) : "",
    make("label", {}, make("input", { type: "checkbox", id: "relative", checked: relative ? "" : null, onchange: event => {
      relative = event.target.checked;
      legend();
      draw();
    } }), "each tensor against its median"),
    make("button", { type: "button", onclick: () => zoom(0.5) }, "Zoom in"),
    make("button", { type: "button", onclick: () => zoom(2) }, "Zoom out"),
    make("button", { type: "button", onclick: () => setView(-Infinity, Infinity) }, "All steps"),
    make("button", { type: "button", id: "first", disabled: data.anomalies.length ? null : "", onclick: () => toAnomaly(0) }, "First anomaly"));
};

const change = async (name, word, number) => {
  const before = kind, named = row >= 0 ? kind.names[row] : "", step = column >= 0 ? kind.starts[column] : 0;
  kind = data.kinds.find(one => one.kind === name) || data.kinds[0];
  const maps_ = kind.maps;
  statistic = maps_.some(map => map.statistic === word) ? word : maps_[0].statistic;
  rank = maps_.some(map => map.rank === number && map.statistic === statistic) ? number
    : maps_.find(map => map.statistic === statistic).rank;
  const found = maps_.filter(map => map.statistic === statistic && map.rank === rank).sort((one, other) => one.side - other.side);
  await Promise.all(found.map(decode));
  const names = [...data.runs, data.runs.length > 1 ? `difference` : ""];
  panels = found.map((map, place) => ({ map, name: names[map.side], gutter: place ? 8 : innerWidth > 640 ? GUTTER : 90,
    canvas: make("canvas", { role: "img", "aria-label": `heat map of ${statistic}, ${names[map.side]}, ${kind.names.length} tensors by step` }) }));
  const title = map => map.side === DIFFERENCE ? map.statistic === "deviation" ? `${data.runs[1]} against ${data.runs[0]}`
    : map.ratio ? `${data.runs[1]} / ${data.runs[0]}` : `${data.runs[1]} minus ${data.runs[0]}` : names[map.side];
  maps.replaceChildren(...panels.map(panel => make("figure", {}, make("figcaption", { title: title(panel.map) }, make("bdi", {}, title(panel.map))), panel.canvas)));
  maps.classList.toggle("three", panels.length > 2);
  panels.forEach(listen);
  if (before !== kind) {
    if (!before || from < kind.starts[0] || to > kind.ends[kind.ends.length - 1] + 1) [from, to] = [kind.starts[0], kind.ends[kind.ends.length - 1] + 1];
    row = kind.names.indexOf(named);
    column = row >= 0 ? columnAt(step) : -1;
  }
  where.textContent = row >= 0 ? cellText(row, column) : "";
  toolbar();
  legend();
  table();
  draw();
};

const legend = () => {
  const bar = map => {
    const diverging = isDiverging(map), box = make("span", { class: "bar" });
    box.style.background = diverging ? colors.bars.deviations : colors.bars.sizes;
    const ends = map.side === DIFFERENCE || map.statistic === "deviation" ? [map.zero - map.span, map.zero + map.span].map(code => text(map, code))
      : diverging ? (map.scale.kind === "log" ? [-1, 1].map(sign => `${show(Math.exp(sign * map.span / (TOP - 1) * (map.scale.high - map.scale.low)))} times`) : ["below", "above its median"])
        : [1, TOP].map(code => text(map, code));
    return make("span", {}, panels.length > 1 ? `${map.side === DIFFERENCE ? "difference" : "runs"}: ` : "", ends[0], box, ends[1]);
  };
  const swatch = (ink, name) => {
    const box = make("i");
    box.style.background = ink;
    return make("span", {}, box, name);
  };
  const kinds = panels.filter((panel, place) => place === 0 || panel.map.side === DIFFERENCE);
  byId("legend").replaceChildren(...kinds.map(panel => bar(panel.map)), swatch(colors.broke, "NaN or Inf"), swatch("var(--page)", "no value"));
};

// ---- tables

const grid = (headings, lines) => make("div", { class: "scroll", tabindex: 0 }, make("table", {},
  make("thead", {}, make("tr", {}, ...headings.map(name => make("th", { scope: "col" }, name)))),
  make("tbody", {}, ...lines.map(line => make("tr", {}, ...line.map(one => make("td", {}, one)))))));

const table = () => {
  const lines = () => panels.flatMap(({ map, name }) => kind.names.map((tensor, number) => {
    const count = kind.starts.length, offset = number * count;
    let low = 65536, high = 0, when = -1, broken = 0, broke = "";
    for (let at = 0; at < count; at += 1) {
      const most = map.most[offset + at], least = map.least[offset + at];
      if (most > TOP) { broken += 1; if (!broke) broke = `, first at step ${kind.starts[at]}`; }
      if (least > 0 && least <= TOP) low = Math.min(low, least);
      const above = most > TOP ? least : most;
      if (above > 0 && above <= TOP && above > high) { high = above; when = kind.starts[at]; }
    }
    const values = high ? [text(map, map.middle[number]), text(map, low), text(map, high), String(when)] : ["", "", "", ""];
    return [tensor, ...(panels.length > 1 ? [name] : []), ...values, broken ? `${broken}${broke}` : "0"];
  }));
  const details = make("details", {}, make("summary", {}, `This map as a table: ${kind.kind}, ${statistic}, rank ${rank}`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    details.append(grid(["Tensor", ...(panels.length > 1 ? ["Run"] : []), "Median", "Smallest", "Largest", "Largest at step", "Not finite cells"], lines()));
  });
  byId("table").replaceChildren(details);
};

const listAnomalies = () => {
  if (!data.anomalies.length) return;
  const lines = data.anomalies.map((one, number) => [
    make("button", { type: "button", onclick: () => toAnomaly(number).then(() => maps.focus()) }, "Show"), String(one.step), `rank ${one.rank}`, one.text]);
  const rest = data.count - data.anomalies.length;
  byId("anomalies").append(make("details", { open: "" }, make("summary", {},
    `Anomalies: ${data.count}${rest > 0 ? `, the first ${data.anomalies.length} listed; trend.json has all` : ""}`), grid(["", "Step", "Rank", "What"], lines)));
};

const start = async () => {
  for (const one of data.kinds) for (const map of one.maps) map.kind = one;
  readColors();
  listAnomalies();
  await change(data.shown.kind, data.shown.statistic, data.shown.rank);
  if (data.anomalies.length) await toAnomaly(0);
  else if (data.shown.name) choose(kind.names.indexOf(data.shown.name), columnAt(data.shown.step));
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); legend(); draw(); });
addEventListener("resize", draw);
if (typeof DecompressionStream === "undefined") where.textContent = "This browser is too old for the maps (DecompressionStream); trend.json has all results.";
else start();

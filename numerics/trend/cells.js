// Part 1 of the page's script, which page.py joins: the cells and their colors. Codes of 16 bits (see pack.py) grow with
// the value: a cell keeps the largest and the smallest code of its steps, a pixel those of its cells.
const data = JSON.parse(document.getElementById("trend-data").textContent);
const TOP = 65532, MINUS = 65533, PLUS = 65534, NAN = 65535;
const GUTTER = 210, AXIS = 20, DIFFERENCE = 2;
const byId = id => document.getElementById(id);
const maps = byId("maps"), where = byId("where"), curve = byId("curve");
const make = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};

let kind, statistic, rank, relative = true, from, to, row = -1, column = -1, drag = null;
let panels = [], colors;

// ---- codes

const planes = (raw, at, length) => {
  const codes = new Uint16Array(length);
  for (let place = 0; place < length; place += 1) codes[place] = raw[at + place] << 8 | raw[at + length + place];
  return codes;
};

// Decode a map at its first use: most and least code of each cell, and the median code of each row.
const decode = async map => {
  if (map.most) return map;
  const text = atob(byId(map.id).textContent), bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) bytes[place] = text.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = raw.length / (map.single ? 2 : 4), wide = map.kind.starts.length;
  map.least = map.single ? null : planes(raw, 2 * length, length);
  const most = planes(raw, 0, length);
  map.least = map.least || most;
  map.middle = Int32Array.from(map.kind.names, (_, number) => {
    const line = most.subarray(number * wide, (number + 1) * wide).filter(code => code > 0 && code <= TOP).sort();
    return line.length ? line[line.length >> 1] : 1;
  });
  map.zero = codeOf(map.scale, 0);
  map.most = most;
  map.span = span(map);
  return map;
};

const codeOf = (scale, value) => {
  const point = scale.kind === "asinh" ? Math.asinh(value / scale.unit) : scale.kind === "log" ? Math.log(value) : value;
  return 1 + (point - scale.low) / (scale.high - scale.low) * (TOP - 1);
};
const valueOf = (scale, code) => {
  if (scale.kind === "log" && code === 1) return 0;
  const point = scale.low + (code - 1) / (TOP - 1) * (scale.high - scale.low);
  return scale.kind === "asinh" ? scale.unit * Math.sinh(point) : scale.kind === "log" ? Math.exp(point) : point;
};
const show = value => value === 0 ? "0" : Math.abs(value) >= 0.01 && Math.abs(value) < 1e5
  ? String(Number(value.toPrecision(4))) : value.toExponential(2);
const times = doublings => {  // a ratio; near 1 by its difference from 1, which is rounding
  const more = Math.expm1(doublings * Math.LN2);
  return more && Math.abs(more) < 1e-3
    ? `1 ${more < 0 ? "-" : "+"} ${show(Math.abs(more))} times` : `${show(2 ** doublings)} times`;
};
const text = (map, code) => {
  if (!code) return "no value";
  if (code === NAN) return "NaN";
  if (code > TOP) return code === PLUS ? "Inf" : "-Inf";
  const value = valueOf(map.scale, code);
  const step = Math.abs(valueOf(map.scale, Math.min(code + 1, TOP)) - value);  // below it, a ratio of 1 was rounded
  return map.ratio ? times(Math.abs(value) < step ? 0 : value) : show(value);
};

// ---- colors

const isDiverging = map => relative || map.side === DIFFERENCE || map.statistic === "deviation";
const base = (map, number) => map.side === DIFFERENCE || map.statistic === "deviation" ? map.zero
  : map.middle[number];

// The difference of codes at which a diverging scale ends: the limit of deviations, else that of all but 0.2 % of the cells.
const span = map => {
  if (map.limit) return codeOf(map.scale, map.limit) - map.zero;
  const wide = map.kind.starts.length, sizes = [];
  const stride = Math.max(1, Math.floor(map.most.length / 200000));
  for (let place = 0; place < map.most.length; place += stride) {
    const code = map.most[place], number = Math.floor(place / wide);
    const center = map.side === DIFFERENCE ? map.zero : map.middle[number];
    if (code > 0 && code <= TOP) sizes.push(Math.max(Math.abs(code - center), Math.abs(map.least[place] - center)));
  }
  sizes.sort((one, other) => one - other);
  return Math.max(1, sizes.length ? sizes[Math.floor(0.998 * (sizes.length - 1))] : 1);
};

const readColors = () => {
  const style = getComputedStyle(document.documentElement);
  const parts = name => [1, 3, 5].map(at => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16));
  const mix = (one, other, share) => one.map((value, at) => Math.round(value + (other[at] - value) * share));
  const pack = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
  const ramp = (stops, share) => {
    const place = Math.min(stops.length - 1.000001, Math.max(0, share) * (stops.length - 1));
    return mix(stops[Math.floor(place)], stops[Math.floor(place) + 1], place % 1);
  };
  const [low, mid, high, minus, zero, plus, broken, page] =
    ["--low", "--mid", "--high", "--minus", "--zero", "--plus", "--broken", "--page"].map(parts);
  const table = stops => Uint32Array.from({ length: 1024 }, (_, at) => pack(ramp(stops, at / 1023)));
  const css = stops => `linear-gradient(90deg, ${stops.map(one => `rgb(${one})`).join(", ")})`;
  colors = {
    sizes: table([low, mid, high]), deviations: table([minus, zero, plus]), broken: pack(broken), missing: pack(page),
    bars: { sizes: css([low, mid, high]), deviations: css([minus, zero, plus]) },
    ink: style.getPropertyValue("--ink"), soft: style.getPropertyValue("--soft"), line: style.getPropertyValue("--line"),
    mark: style.getPropertyValue("--mark"), broke: style.getPropertyValue("--broken"),
    lines: ["--accent", "--bad"].map(name => style.getPropertyValue(name)), font: getComputedStyle(document.body).fontFamily,
  };
};

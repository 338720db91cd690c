// Part 2 of the page's script: the heat maps and the curve, each on a canvas.

// ---- drawing

const rowHeight = () => Math.max(4, Math.min(18, Math.floor(640 / kind.names.length)));
const fit = (canvas, height) => {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return [context, width, scale];
};

// For each of `wide` pixels the first and the last column of its steps: a column lasts until the next one starts.
const columnsOf = wide => {
  const starts = kind.starts, first = new Int32Array(wide), last = new Int32Array(wide);
  let at = -1;
  for (let pixel = 0; pixel < wide; pixel += 1) {
    const begin = from + pixel / wide * (to - from), end = from + (pixel + 1) / wide * (to - from);
    while (at + 1 < starts.length && starts[at + 1] <= begin) at += 1;
    first[pixel] = Math.max(at, 0);
    let until = Math.max(at, 0);
    while (until + 1 < starts.length && starts[until + 1] < end) until += 1;
    last[pixel] = at < 0 && until === 0 && starts[0] >= end ? -1 : until;
  }
  return [first, last];
};

const paint = (map, pixels, wide, lineHeight) => {
  const [first, last] = columnsOf(wide), count = kind.starts.length, rows = kind.names.length;
  const diverging = isDiverging(map), table = diverging ? colors.deviations : colors.sizes;
  const factor = diverging ? 511.5 / map.span : 1023 / (TOP - 1);
  for (let number = 0; number < rows; number += 1) {
    const offset = number * count, center = base(map, number), start = number * lineHeight * wide;
    for (let pixel = 0; pixel < wide; pixel += 1) {
      let most = 0, least = 65536;
      for (let at = offset + first[pixel], until = offset + last[pixel]; at <= until; at += 1) {
        const above = map.most[at], below = map.least[at];
        if (above > most) most = above;
        if (below > 0 && below < least) least = below;
      }
      let ink;
      if (most === 0) ink = colors.missing;
      else if (most > TOP) ink = colors.broken;
      else {
        const code = most - center >= center - least ? most : least; // the extreme
        const place = diverging ? 511.5 + (code - center) * factor : (code - 1) * factor;
        ink = table[place < 0 ? 0 : place > 1023 ? 1023 : place | 0];
      }
      pixels[start + pixel] = ink;
    }
    for (let pixel = start + wide - 2; pixel > start; pixel -= 1) { // at least two pixels wide
      if (pixels[pixel] === colors.broken) pixels[pixel + 1] = colors.broken;
    }
    for (let line = 1; line < lineHeight; line += 1) pixels.copyWithin(start + line * wide, start, start + wide);
  }
};

const ticks = (context, left, width, y) => {
  context.fillStyle = colors.soft;
  context.textBaseline = "top";
  const count = Math.max(2, Math.min(6, Math.floor(width / 90)));
  for (let number = 0; number < count; number += 1) {
    const step = Math.round(from + (to - 1 - from) * number / (count - 1));
    context.textAlign = number === 0 ? "left" : number === count - 1 ? "right" : "center";
    context.fillText(String(step), left + width * number / (count - 1), y);
  }
};

const drawPanel = panel => {
  const height = rowHeight(), rows = kind.names.length, gutter = panel.gutter;
  const [context, whole, scale] = fit(panel.canvas, rows * height + AXIS);
  context.clearRect(0, 0, whole, rows * height + AXIS);
  const width = whole - gutter, wide = Math.max(1, Math.round(width * scale)), line = Math.max(1, Math.round(height * scale));
  const drawn = [panel.map.id, from, to, relative, wide, line, colors.missing].join();
  if (panel.drawn !== drawn) { // a move of the chosen cell alone keeps the image
    if (!panel.image || panel.image.width !== wide || panel.image.height !== rows * line) panel.image = new ImageData(wide, rows * line);
    paint(panel.map, new Uint32Array(panel.image.data.buffer), wide, line);
    panel.drawn = drawn;
  }
  context.putImageData(panel.image, Math.round(gutter * scale), 0);
  context.font = `11px ${colors.font}`;
  if (gutter > 20) labels(context, height, gutter);
  ticks(context, gutter, width, rows * height + 5);
  context.strokeStyle = colors.mark;
  for (const one of data.anomalies.slice(0, 1)) {
    const at = kind.names.indexOf(one.name);
    if (one.kind !== kind.kind || one.rank !== rank || at < 0) continue;
    const x = gutter + (one.step + 0.5 - from) / (to - from) * width;
    if (x < gutter || x > whole) continue;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x, (at + 0.5) * height, Math.max(8, height / 2 + 3), 0, 2 * Math.PI);
    context.stroke();
    context.lineWidth = 1;
  }
  if (row >= 0) {
    context.globalAlpha = 0.8;
    const x = gutter + ((kind.starts[column] + kind.ends[column] + 1) / 2 - from) / (to - from) * width;
    context.beginPath();
    context.moveTo(gutter, (row + 0.5) * height);
    context.lineTo(whole, (row + 0.5) * height);
    if (x >= gutter) { context.moveTo(x, 0); context.lineTo(x, rows * height); }
    context.setLineDash([3, 3]);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }
  if (drag && drag.panel && Math.abs(drag.to - drag.from) > 3) {
    context.globalAlpha = 0.25;
    context.fillStyle = colors.ink;
    context.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), rows * height);
    context.globalAlpha = 1;
  }
};

// Names of rows where they fit, else of the layers; the chosen row in full.
const layer = name => (/^(.*?\.\d+)(?=\.|$)/.exec(name) || [0, name.split(".").slice(0, -1).join(".") || name])[1];
const labels = (context, height, gutter) => {
  const rows = kind.names.length;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const write = (words, y, ink) => {
    let shown = words;
    while (shown.length > 4 && context.measureText(shown).width > gutter - 8) shown = `…${shown.slice(2)}`;
    context.fillStyle = ink;
    context.fillText(shown, gutter - 6, y);
  };
  let free = -20;
  for (let number = 0, end; number < rows; number = end) {
    end = number + 1;
    if (height < 11) while (end < rows && layer(kind.names[end]) === layer(kind.names[number])) end += 1;
    const y = (number + end) / 2 * height, chosenNear = row >= 0 && Math.abs((row + 0.5) * height - y) < 12 && height < 11;
    if (y - free < 11 || chosenNear) continue;
    free = y;
    write(height < 11 ? layer(kind.names[number]) : kind.names[number], y, number === row ? colors.ink : colors.soft);
  }
  if (row >= 0 && height < 11) write(kind.names[row], Math.max(6, (row + 0.5) * height), colors.ink);
};

const drawCurve = () => {
  const [context, whole] = fit(curve, 230);
  context.clearRect(0, 0, whole, 230);
  const shown = panels.filter(panel => panel.map.side !== DIFFERENCE);
  if (row < 0 || !shown.length) { curve.setAttribute("aria-label", "no tensor chosen"); return; }
  const left = 78, width = whole - left - 10, top = 26, high = 170, count = kind.starts.length;
  const inside = [];
  for (let at = 0; at < count; at += 1) if (kind.ends[at] >= from && kind.starts[at] < to) inside.push(at);
  let low = TOP, up = 1;
  for (const { map } of shown) for (const at of inside) {
    const most = map.most[row * count + at], least = map.least[row * count + at];
    if (least > 0 && least <= TOP) low = Math.min(low, least);
    if (most > 0 && most <= TOP) up = Math.max(up, most);
  }
  if (up <= low) { low = Math.max(1, low - 300); up = Math.min(TOP, up + 300); }
  const y = code => top + high - (code - low) / (up - low) * high;
  const x = at => left + ((kind.starts[at] + kind.ends[at] + 1) / 2 - from) / (to - from) * width;
  context.font = `11px ${colors.font}`;
  context.strokeStyle = colors.line;
  context.fillStyle = colors.soft;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let number = 0; number < 5; number += 1) {
    const code = Math.round(low + (up - low) * number / 4);
    context.beginPath();
    context.moveTo(left, y(code));
    context.lineTo(left + width, y(code));
    context.stroke();
    context.fillText(text(shown[0].map, code), left - 6, y(code));
  }
  ticks(context, left, width, top + high + 8);
  shown.forEach(({ map, name }, number) => {
    const ink = colors.lines[shown.length > 1 ? number : 0];
    context.strokeStyle = ink;
    context.lineWidth = 1.3;
    context.beginPath();
    let pen = false;
    for (const at of inside) {
      const most = map.most[row * count + at], least = map.least[row * count + at];
      if (!most) continue; // not recorded at this step
      if (most > TOP) {
        context.fillStyle = colors.broke;
        context.fillRect(x(at) - 2, top - 6, 4, 6);
      }
      if (!least || least > TOP) { pen = false; continue; }
      const above = most > TOP ? least : most;
      if (pen) context.lineTo(x(at), y(above)); else context.moveTo(x(at), y(above));
      if (least !== above) context.lineTo(x(at), y(least));
      else if (!pen) context.lineTo(x(at) + 0.5, y(above));
      pen = true;
    }
    context.stroke();
    context.fillStyle = ink;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(`${shown.length > 1 ? `${name}: ` : ""}${kind.names[row]}, ${statistic}`, left + number * width / 2, 4);
  });
  context.fillStyle = colors.mark;
  for (const one of data.anomalies) {
    if (one.kind !== kind.kind || one.rank !== rank || one.name !== kind.names[row]) continue;
    const at = left + (one.step + 0.5 - from) / (to - from) * width;
    if (at < left || at > left + width) continue;
    context.beginPath();
    context.moveTo(at, top + high);
    context.lineTo(at - 4, top + high + 7);
    context.lineTo(at + 4, top + high + 7);
    context.fill();
  }
  curve.setAttribute("aria-label", `curve of ${kind.names[row]}, ${statistic}, steps ${from} to ${to - 1}; ${where.textContent}`);
};

let waiting = false;
const draw = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    panels.forEach(drawPanel);
    drawCurve();
    document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
  });
};

// The tree of a record or of a comparison. Only the rows in sight are elements of the page, so that its size does not
// matter. All texts of the data are set as text, never as HTML.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("tree-data").textContent);
  const ROW = 26, EXTRA = 10, INDENT = 14; // pixels, rows, pixels
  const GRADES = ["wrong", "beyond rounding", "unmatched", "rounding", "equal"]; // the worst first
  const LEVELS = ["critical", "high", "medium"];
  const MEANING = {
    "wrong": "the inputs agree and the result does not: the first divergence",
    "beyond rounding": "the result differs by more than rounding, as its inputs do: a consequence",
    "rounding": "the result differs by no more than correct kernels do",
    "equal": "every recorded result is equal",
    "unmatched": "the call is on one side alone",
    "recorded": "one record, nothing to compare with",
    "critical": "normal input, abnormal output (NaN or Inf): check it first",
    "high": "abnormal input and output, or an output more than 100 times as large as the input: check it by hand",
    "medium": "abnormal input, normal output: check it last",
  };
  const single = !data.golden;
  const byId = id => document.getElementById(id);
  const tree = byId("tree"), space = byId("space"), rows = byId("rows"), details = byId("details");
  const tools = byId("tools"), matching = byId("matching");

  // An element with attributes and children; a string is text.
  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children.filter(child => child !== null && child !== ""));
    return element;
  };

  let step; // the shown step
  let open; // node -> whether it is open
  let shown = []; // the nodes of the visible branches, in order
  let position = new Map(); // node -> its place in `shown`
  let chosen = -1;
  let picking = -1; // the node that waits for its counterpart
  const filter = new Set(); // grades and levels; none: all
  let wanted = ""; // text in the name
  const map = new Map(Object.entries(data.map));

  // ---- the tree

  // Set end (of the subtree), parent and the worst grade within of each node. Nodes are in the order of the tree.
  const prepare = nodes => {
    if (nodes.length && nodes[0].end !== undefined) return;
    const around = [];
    nodes.forEach((node, number) => {
      while (around.length > node.depth) nodes[around.pop()].end = number;
      node.parent = around.length ? around[around.length - 1] : -1;
      node.end = nodes.length;
      node.level = LEVELS.find(level => node.levels.includes(level)) || "";
      node.worst = single ? node.level : node.grade;
      around.push(number);
    });
    const order = single ? [...LEVELS, ""] : GRADES;
    for (let number = nodes.length - 1; number >= 0; number -= 1) {
      const node = nodes[number], outer = nodes[node.parent];
      if (outer && order.indexOf(node.worst) < order.indexOf(outer.worst)) outer.worst = node.worst;
    }
  };

  const isWanted = node => (!filter.size || filter.has(node.grade) || filter.has(node.level))
    && (!wanted || `${node.target} ${node.golden}`.toLowerCase().includes(wanted));
  const isFiltered = () => filter.size > 0 || wanted !== "";

  // Collect the visible nodes: of open branches, or with a filter the wanted nodes and those around them.
  const collect = () => {
    const nodes = step.nodes, keep = new Uint8Array(nodes.length), all = !isFiltered();
    if (!all) {
      for (let number = nodes.length - 1; number >= 0; number -= 1) {
        if (isWanted(nodes[number])) keep[number] = 1;
        if (keep[number] && nodes[number].parent >= 0) keep[nodes[number].parent] = 1;
      }
    }
    shown = [];
    for (let number = 0; number < nodes.length;) {
      if (all || keep[number]) shown.push(number);
      number = (all && !open[number]) || (!all && !keep[number]) ? nodes[number].end : number + 1;
    }
    position = new Map(shown.map((number, place) => [number, place]));
    space.style.height = `${shown.length * ROW}px`;
    // Here, because the rows of before keep the space from shrinking until they are replaced.
    tree.scrollTop = Math.min(tree.scrollTop, Math.max(0, shown.length * ROW - tree.clientHeight));
    render();
  };

  const colorOf = (grade) => grade === "beyond rounding" ? "beyond" : grade;
  const hasInner = number => step.nodes[number].end > number + 1;
  const isOpen = number => hasInner(number) && (isFiltered() || open[number]);

  const side = (node, label, className, number) => {
    const cell = make("span", { class: label ? className : `${className} empty` });
    cell.style.paddingLeft = `${Math.min(node.depth, 24) * INDENT + 6}px`;
    if (!label) return cell;
    const sign = hasInner(number) ? (isOpen(number) ? "▾" : "▸") : "";
    const hidden = hasInner(number) && !isOpen(number) && node.worst && node.worst !== (single ? node.level : node.grade);
    const dot = make("i", { class: hidden ? `inside ${colorOf(node.worst)}` : null, title: hidden ? `${node.worst} inside` : null });
    if (hidden) dot.style.setProperty("--inside", "var(--color)");
    cell.append(make("b", {}, sign), dot, label, node.backward && !node.depth ? make("small", {}, " backward") : "");
    return cell;
  };

  const rowOf = (place) => {
    const number = shown[place], node = step.nodes[number];
    const byHand = node.key !== undefined && isMapped(node);
    const remark = [node.level, byHand ? "matched by hand" : !single && node.grade === "unmatched"
      ? `${node.golden ? "golden" : "target"} alone` : node.units && node.units !== "0" ? node.units : ""];
    const row = make("div", {
      class: `node ${single ? node.level || "recorded" : colorOf(node.grade)}${node.target && node.golden ? " both" : ""}`,
      role: "treeitem", id: `node-${number}`, "aria-level": node.depth + 1, "aria-selected": String(number === chosen),
      "aria-expanded": hasInner(number) ? String(isOpen(number)) : null, "data-number": number,
      title: node.golden || node.target, "aria-label": `${node.labels[1] || node.labels[0]}, ${node.level || node.grade}`,
    }, side(node, node.labels[0], "target", number), side(node, node.labels[1], "golden", number),
    make("em", {}, remark.filter(Boolean).join(", ")));
    return row;
  };

  const render = () => {
    const first = Math.max(0, Math.floor(tree.scrollTop / ROW) - EXTRA);
    const last = Math.min(shown.length, Math.ceil((tree.scrollTop + tree.clientHeight) / ROW) + EXTRA);
    rows.style.transform = `translateY(${first * ROW}px)`;
    const fresh = [];
    for (let place = first; place < last; place += 1) fresh.push(rowOf(place));
    rows.replaceChildren(...fresh);
    if (position.has(chosen)) tree.setAttribute("aria-activedescendant", `node-${chosen}`);
    else tree.removeAttribute("aria-activedescendant");
  };

  let waiting = false;
  tree.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; render(); });
  }, { passive: true });
  addEventListener("resize", () => render());

  const choose = (number, { jump = false } = {}) => {
    const before = chosen;
    chosen = number;
    if (jump || !position.has(number)) {
      if (isFiltered() && !isWanted(step.nodes[number])) clearFilter();
      for (let outer = step.nodes[number].parent; outer >= 0; outer = step.nodes[outer].parent) open[outer] = true;
      collect();
    }
    const top = position.get(number) * ROW;
    if (jump) tree.scrollTop = top - tree.clientHeight / 3;
    else if (top < tree.scrollTop) tree.scrollTop = top;
    else if (top + ROW > tree.scrollTop + tree.clientHeight) tree.scrollTop = top + ROW - tree.clientHeight;
    render();
    if (before !== number || jump) describe();
  };

  const toggle = (number, state = !open[number]) => {
    open[number] = state;
    if (!state && chosen > number && chosen < step.nodes[number].end) {
      chosen = number;
      describe();
    }
    collect();
  };

  tree.addEventListener("click", event => {
    const row = event.target.closest(".node");
    if (!row) return;
    const number = Number(row.dataset.number);
    if (picking >= 0) { pick(number); return; }
    if (event.target.tagName === "B" && hasInner(number)) toggle(number);
    choose(number);
  });
  tree.addEventListener("dblclick", event => {
    const row = event.target.closest(".node");
    if (row && event.target.tagName !== "B" && hasInner(Number(row.dataset.number))) toggle(Number(row.dataset.number));
  });

  tree.addEventListener("keydown", event => {
    if (event.ctrlKey || event.altKey || event.metaKey || !shown.length) return;
    const place = position.has(chosen) ? position.get(chosen) : -1, page = Math.floor(tree.clientHeight / ROW);
    const go = where => choose(shown[Math.max(0, Math.min(shown.length - 1, where))]);
    const actions = {
      ArrowDown: () => go(place + 1),
      ArrowUp: () => go(place - 1),
      PageDown: () => go(place + page),
      PageUp: () => go(place - page),
      Home: () => go(0),
      End: () => go(shown.length - 1),
      ArrowRight: () => {
        if (place >= 0 && hasInner(chosen)) { if (isOpen(chosen)) go(place + 1); else toggle(chosen, true); }
      },
      ArrowLeft: () => {
        if (place < 0) return;
        if (isOpen(chosen) && !isFiltered()) toggle(chosen, false);
        else if (step.nodes[chosen].parent >= 0) choose(step.nodes[chosen].parent);
      },
      Enter: () => { if (picking >= 0) pick(chosen); else describe(); },
      Escape: () => { picking = -1; describe(); },
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });

  // ---- the chosen call

  const table = (headings, lines, differs) => make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...headings.map(text => make("th", {}, text)))),
    make("tbody", {}, ...lines.map(line => make("tr", { class: differs(line) ? "differs" : null },
      ...line.map(text => make("td", {}, text.replace("]: ", "]\n"))))))));

  const describe = () => {
    details.replaceChildren();
    if (chosen < 0) { details.append(make("p", { class: "soft" }, "Choose a call.")); return; }
    const node = step.nodes[chosen], sides = single ? ["Value"] : ["Target", "Golden"];
    details.append(make("h2", {}, node.golden || node.target));
    if (node.target && node.golden && node.target !== node.golden) {
      details.append(make("p", { class: "soft" }, `target: ${node.target}`));
    }
    if (!single) details.append(make("p", {}, make("strong", {}, node.grade), `: ${MEANING[node.grade]}.`));
    if (chosen === step.first) details.append(make("p", {}, `First divergence: ${step.why}.`));
    node.levels.forEach((level, number) => {
      const where = single ? "" : number ? " (golden)" : " (target)";
      if (level) details.append(make("p", {}, make("strong", {}, `overflow ${level}`), `${where}: ${MEANING[level]}.`));
    });
    if (node.replayed) {
      details.append(make("p", {}, `From the function in float64: target ${node.replayed[0]}, golden ${node.replayed[1]} units of rounding.`));
    }
    if (node.differs.length) details.append(make("ul", {}, ...node.differs.map(text => make("li", {}, text))));
    details.append(matchButton(node));
    const columns = line => single ? [line[0], line[1]] : line;
    if (node.values.length) {
      details.append(make("h3", {}, "Values"), table(
        single ? ["Place", "Value"] : ["Place", ...sides, "Units of rounding"], node.values.map(columns),
        line => !single && line[3] && line[3] !== "equal"));
    }
    if (node.settings.length) {
      details.append(make("h3", {}, "Settings"), table(
        ["Name", ...sides], node.settings.map(columns),
        line => !single && node.target && node.golden && line[1] !== line[2]));
    }
    node.stacks.forEach((stack, number) => {
      if (stack === null || (number && node.stacks[0] === stack)) return;
      const name = single || node.stacks[0] === node.stacks[1] ? "" : number ? " of the golden call" : " of the target's call";
      details.append(make("h3", {}, `Call stack${name}`),
        make("ol", {}, ...step.stacks[stack].map(line => make("li", {}, make("code", {}, line)))));
    });
    details.scrollTop = 0;
  };

  // ---- matching by hand

  const isMapped = node => [node.key, node.path].some(key => key && (node.target ? map.has(key) : [...map.values()].flat().includes(key)));

  const matchButton = node => {
    if (single || node.key === undefined) return "";
    const other = node.target ? "golden" : "target";
    if (picking === chosen) {
      return make("p", {}, make("strong", {}, `Choose the unmatched ${other} call in the tree (Escape: none).`));
    }
    return make("p", {}, make("button", { type: "button", onclick: () => { picking = chosen; describe(); tree.focus(); } },
      `Match with a ${other} call`));
  };

  const pick = number => {
    const one = step.nodes[picking], other = step.nodes[number];
    const fits = other.key !== undefined && Boolean(one.target) !== Boolean(other.target) && one.kind === other.kind
      && one.backward === other.backward;
    if (!fits) {
      choose(number);
      details.append(make("p", { role: "alert" },
        `This is no unmatched ${one.backward ? "backward" : "forward"} of a ${one.kind} of the other side; Escape ends matching.`));
      return;
    }
    const [target, golden] = one.target ? [one, other] : [other, one];
    const key = target.path && golden.path ? "path" : "key"; // a module with all calls within it, or one call
    const others = [...new Set([map.get(target[key]) || [], golden[key]].flat())];
    map.set(target[key], others.length > 1 ? others : others[0]); // several: the parts of a layer
    picking = -1;
    choose(number);
    describe();
    listMatches();
    render();
  };

  const listMatches = () => {
    matching.replaceChildren();
    if (!map.size) return;
    const save = () => {
      const text = `${JSON.stringify(Object.fromEntries(map), null, 1)}\n`;
      const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
      make("a", { href: address, download: "map.json" }).click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    };
    matching.append(
      make("h2", {}, "Matched by hand"),
      make("p", {}, make("button", { type: "button", id: "save", onclick: save }, "Save map.json"), " Then compare again: ",
        make("code", {}, `python -m referee compare -tp ${data.target} -gp ${data.golden} --map map.json`)),
      make("ul", {}, ...[...map].map(([target, golden]) => make("li", {}, make("code", {}, `${target} → ${[golden].flat().join(", ")} `),
        make("button", { type: "button", onclick: () => { map.delete(target); listMatches(); render(); } }, "Remove")))));
  };

  // ---- filters and jumps

  const clearFilter = () => {
    filter.clear();
    wanted = "";
    tools.querySelectorAll("[aria-pressed]").forEach(button => button.setAttribute("aria-pressed", "false"));
    tools.querySelector("input").value = "";
  };

  // Go to the first divergence of this step, else to that of the record.
  const toFirst = () => {
    if (step.first === null) show(firstStep());
    else choose(step.first, { jump: true });
  };
  const firstStep = () => data.steps.findIndex(one => one.first !== null);

  // Go to the next call that the filter lets through; without a filter to the next that is not equal.
  const next = () => {
    const nodes = step.nodes, isNext = node => isFiltered() ? isWanted(node)
      : single ? node.level !== "" : !["equal", "rounding"].includes(node.grade);
    for (let ahead = 1; ahead <= nodes.length; ahead += 1) {
      const number = (chosen + ahead + nodes.length) % nodes.length;
      if (isNext(nodes[number])) { choose(number, { jump: true }); return; }
    }
  };

  // Show the wanted calls, the chosen one in sight.
  const refilter = () => {
    collect();
    if (position.has(chosen)) choose(chosen);
  };

  const setAll = state => {
    open.fill(state);
    refilter();
  };

  const chip = (name, count) => make("button", {
    type: "button", "aria-pressed": String(filter.has(name)), class: colorOf(name), title: MEANING[name],
    onclick: event => {
      if (!filter.delete(name)) filter.add(name);
      event.currentTarget.setAttribute("aria-pressed", String(filter.has(name)));
      refilter();
    },
  }, make("i"), `${name} (${count})`);

  const counts = (nodes, names, of) => names.map(name => [name, nodes.filter(node => of(node) === name).length])
    .filter(([, count]) => count).map(([name, count]) => chip(name, count));

  const toolbar = () => {
    byId("heads").replaceChildren(...(single ? [] : ["target", "golden", "units of rounding"]).map(text => make("span", {}, text)));
    const places = data.steps.map((one, number) => make("option", { value: number, selected: one === step ? "" : null },
      one.place || "the record"));
    tools.replaceChildren(
      data.steps.length > 1 ? make("select", { id: "place", "aria-label": "step and rank", onchange: event => {
        clearFilter();
        show(Number(event.target.value));
      } }, ...places) : "",
      single ? "" : make("button", { type: "button", id: "first", disabled: firstStep() < 0 ? "" : null,
        onclick: toFirst }, "First divergence"),
      make("button", { type: "button", id: "next", onclick: next }, "Next"),
      ...(single ? [] : counts(step.nodes, GRADES, node => node.grade)),
      ...counts(step.nodes, LEVELS, node => node.level),
      make("input", { type: "search", placeholder: "name", "aria-label": "part of a name", oninput: event => {
        wanted = event.target.value.trim().toLowerCase();
        refilter();
      } }),
      make("button", { type: "button", onclick: () => setAll(true) }, "Open all"),
      make("button", { type: "button", onclick: () => setAll(false) }, "Close all"));
  };

  const show = number => {
    step = data.steps[number];
    prepare(step.nodes);
    open = step.nodes.map(node => node.depth === 0);
    chosen = picking = -1;
    tree.classList.toggle("single", single);
    toolbar();
    collect();
    tree.scrollTop = 0;
    if (step.first !== null) choose(step.first, { jump: true });
    else describe();
    listMatches();
  };

  show(Math.max(0, firstStep()));
  document.documentElement.dataset.drawn = "yes";
})();

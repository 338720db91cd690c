// Sort the tables that have data-sortable; see referee/pages/html_page.py.
"use strict";
(() => {
  const UNITS = { s: 1, second: 1, seconds: 1, minute: 60, minutes: 60, hour: 3600, hours: 3600, day: 86400, days: 86400 };
  const LETTERS = { k: 1e3, M: 1e6, B: 1e9, T: 1e12, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };
  const words = new Intl.Collator("en", { numeric: true });

  // The number at the start of a cell, a time in seconds; null for no number, undefined for an empty cell or a dash.
  const numberOf = text => {
    const value = text.trim().replace(/\u2212/g, "-").replace(/\u00a0/g, " ");
    if (/^[-–—]?$/.test(value)) return undefined;
    const found = /^([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?: ?([A-Za-z]+))?(?=$|[^\w.])/.exec(value);
    if (!found) return null;
    return Number(found[1].replace(/,/g, "")) * (UNITS[found[2]] || LETTERS[found[2]] || 1);
  };

  // Without the small type below a number.
  const textOf = cell => {
    const copy = cell.cloneNode(true);
    for (const part of copy.querySelectorAll("small")) part.remove();
    return copy.textContent.trim();
  };

  const sortable = table => {
    const body = table.tBodies[0], original = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const sort = column => {
      const head = heads[column], before = head.getAttribute("aria-sort");
      const order = { ascending: "descending", descending: "" }[before] ?? "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      if (order) head.setAttribute("aria-sort", order);
      const texts = new Map(original.map(row => [row, textOf(row.cells[column])]));
      const numbers = new Map(original.map(row => [row, numberOf(texts.get(row))]));
      const known = [...numbers.values()].filter(value => value !== undefined); // null: a word
      const numeric = 2 * known.filter(value => value !== null).length > known.length;
      const compare = numeric ? (a, b) => numbers.get(a) - numbers.get(b) : (a, b) => words.compare(texts.get(a), texts.get(b));
      const empty = row => numbers.get(row) === undefined || (numeric && numbers.get(row) === null);
      const sign = order === "descending" ? -1 : 1;
      const rows = !order ? original
        : [...original].sort((a, b) => (empty(a) - empty(b)) || (empty(a) ? 0 : sign * compare(a, b))); // empty ones last
      body.append(...rows);
    };
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(column));
      head.append(button);
    });
  };

  for (const table of document.querySelectorAll("table[data-sortable]")) sortable(table);
})();

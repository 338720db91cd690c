// Ask for the state of the study every few seconds and show it. Texts are set as text, never as HTML.
"use strict";
(() => {
  const EVERY = 3000, find = id => document.getElementById(id);

  const color = number => getComputedStyle(document.documentElement).getPropertyValue(`--v${number % 10}`).trim();

  const fill = (parent, tag, texts) => {
    parent.replaceChildren(...texts.map(text => {
      const item = document.createElement(tag);
      item.textContent = text;
      return item;
    }));
  };

  const draw = runs => {
    const style = getComputedStyle(document.documentElement), soft = style.getPropertyValue("--soft").trim();
    const axis = title => ({ title: { text: title }, gridcolor: style.getPropertyValue("--line").trim(), zeroline: false, color: soft });
    const traces = runs.filter(run => run.curve.length).map(run => ({
      type: "scatter", mode: "lines", name: run.cells[0], line: { color: color(run.color), width: 1.5 },
      x: run.curve.map(point => point[0]), y: run.curve.map(point => point[1]),
    }));
    const layout = {
      height: 340, margin: { t: 10, r: 10, b: 45, l: 55 }, showlegend: traces.length > 1 && traces.length <= 12,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: soft }, uirevision: "kept",
      xaxis: axis("iteration"), yaxis: axis("nats per token"),
    };
    Plotly.react(find("curves"), traces, layout, { displayModeBar: false, responsive: true });
  };

  const show = state => {
    find("summary").textContent = [state.summary, state.left].filter(Boolean).join("; ");
    find("runs").replaceChildren(...state.runs.map(run => {
      const row = document.createElement("tr");
      fill(row, "td", run.cells);
      return row;
    }));
    fill(find("reasons"), "li", state.runs.filter(run => run.reason).map(run => `${run.cells[0]}: ${run.reason}`));
    find("left-out").textContent = state.left_out > 0 ? `${state.left_out} more runs have no curve here` : "";
    find("report").hidden = !state.report;
    draw(state.runs);
  };

  const ask = async () => {
    try {
      const answer = await fetch("state.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      show(await answer.json());
      find("trouble").textContent = "";
    } catch (error) {
      find("trouble").textContent = `no new state: ${error.message}; fix: make serve`;
    }
    setTimeout(ask, EVERY);
  };
  ask();
})();

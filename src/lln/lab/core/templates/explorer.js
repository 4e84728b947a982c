// Draws what was measured; computes nothing. Everything it needs is in the page.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const BOX = { left: 46, right: 10, top: 10, bottom: 40, width: 320, height: 240 };
  const find = (id) => document.getElementById(id);
  const slider = find("temperature"), dim = find("dim"), matching = find("matching");

  slider.value = data.temperatures.indexOf(data.start.temperature);
  dim.value = data.start.dim;
  matching.value = data.start.matching;

  // LLN as the chosen matching makes it, under its own name.
  function chosen() {
    const of = data.values[dim.value];
    const shown = data.looks.filter((look) => look.series !== matching.value); // the paper's is not shown twice
    return shown.map((look) => ({ look, rows: of[look.series || (look.name === "LLN" ? matching.value : look.name)] }));
  }

  function element(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  // Axes, and two functions from values to places.
  function frame(svg, x, y) {
    svg.replaceChildren();
    const width = BOX.width - BOX.left - BOX.right, height = BOX.height - BOX.top - BOX.bottom;
    const scale = (axis, value) => {
      const f = axis.log ? Math.log : (v) => v;
      return (f(value) - f(axis.low)) / (f(axis.high) - f(axis.low));
    };
    const across = (value) => BOX.left + width * scale(x, value);
    const up = (value) => BOX.top + height * (1 - scale(y, value));
    for (const tick of x.ticks) {
      element(svg, "line", { x1: across(tick), x2: across(tick), y1: BOX.top, y2: BOX.top + height, class: "grid" });
      element(svg, "text", { x: across(tick), y: BOX.top + height + 16, "text-anchor": "middle" }, x.name ? x.name(tick) : tick);
    }
    for (const tick of y.ticks) {
      element(svg, "line", { x1: BOX.left, x2: BOX.left + width, y1: up(tick), y2: up(tick), class: "grid" });
      element(svg, "text", { x: BOX.left - 6, y: up(tick) + 4, "text-anchor": "end" }, tick);
    }
    element(svg, "text", { x: BOX.left + width / 2, y: BOX.height - 6, "text-anchor": "middle" }, x.title);
    return { across, up };
  }

  function line(svg, points, look) {
    const width = look.name === "softmax" ? 4 : 2;
    const d = points.map(([x, y], i) => (i ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");
    element(svg, "path", { d, fill: "none", stroke: look.colour, "stroke-width": width, "stroke-dasharray": look.dash[1] ? look.dash.join(" ") : "none" });
  }

  function histogram(found, at) {
    const { low, high, count } = data.bins, step = (high - low) / count;
    const peak = Math.max(...found.map(({ rows }) => Math.max(...rows[at].histogram)));
    const whole = peak > 1000 ? 1000 : 200; // an axis to a round number of percent
    const most = whole * Math.ceil(peak / whole);
    const powers = [-3, -2, -1, 0, 1, 2].map((p) => Math.log(10) * p);
    const place = frame(find("histogram"),
      { low, high, ticks: powers, title: "weight, as a multiple of an even share", name: (v) => ["0.001", "0.01", "0.1", "1", "10", "100"][powers.indexOf(v)] },
      { low: 0, high: most / 100, ticks: [0, most / 200, most / 100] });
    for (const { look, rows } of found) {
      line(find("histogram"), rows[at].histogram.map((n, i) => [place.across(low + (i + 0.5) * step), place.up(n / 100)]), look);
    }
    element(find("histogram"), "text", { x: BOX.left + 4, y: BOX.top + 10 }, "% of entries");
  }

  function curve(id, key, top, ticks, found, at) {
    const svg = find(id), temperatures = data.temperatures;
    const place = frame(svg,
      { low: temperatures[0], high: temperatures[temperatures.length - 1], ticks: [0.25, 0.5, 1, 2, 4, 8], log: true, title: "temperature" },
      { low: 0, high: top, ticks });
    element(svg, "line", { x1: place.across(temperatures[at]), x2: place.across(temperatures[at]), y1: place.up(0), y2: place.up(top), class: "marker" });
    if (key === "entropy") element(svg, "line", { x1: BOX.left, x2: BOX.width - BOX.right, y1: place.up(data.most), y2: place.up(data.most), class: "even" });
    for (const { look, rows } of found) {
      line(svg, rows.map((row, i) => [place.across(temperatures[i]), place.up(row[key])]), look);
      element(svg, "circle", { cx: place.across(temperatures[at]), cy: place.up(rows[at][key]), r: 4.5, fill: look.colour });
    }
  }

  function legend() {
    const list = find("explorer-legend");
    list.replaceChildren();
    for (const { look } of chosen()) {
      const item = document.createElement("li"), svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("viewBox", "0 0 28 8");
      svg.setAttribute("aria-hidden", "true");
      line(svg, [[0, 4], [28, 4]], look);
      const how = matching.value === "unmatched" ? "unmatched" : `${matching.value} matching`;
      item.append(svg, look.name === "LLN" ? `LLN, ${how}` : look.name);
      list.append(item);
    }
  }

  function table(found, at) {
    const body = find("explorer-table").tBodies[0];
    body.replaceChildren();
    for (const { look, rows } of found) {
      const row = body.insertRow(), { entropy, gap, zero } = rows[at];
      for (const text of [look.name, entropy.toFixed(2), `${Math.round(2 ** entropy)} tokens`, gap.toFixed(3), `${Math.round(100 * zero)} %`]) { const cell = row.insertCell(); cell.textContent = text; if (text === look.name) cell.className = "word"; }
    }
  }

  // The weights of one sentence: each row is a word that looks at the words of the columns.
  function maps(at) {
    const { words, maps: of } = data.sentence, n = words.length, cell = 17, side = 52;
    const names = { softmax: "softmax", LLN: `LLN, ${matching.value}`, "LLN+Diag": `LLN+Diag, ${matching.value}` };
    for (const [title, name] of Object.entries(names)) {
      const svg = find(`map-${title}`), weights = of[name][at];
      if (!svg.childNodes.length) {
        words.forEach((word, i) => {
          element(svg, "text", { x: side - 4, y: side + cell * i + 13, "text-anchor": "end" }, word);
          element(svg, "text", { transform: `translate(${side + cell * i + 12} ${side - 5}) rotate(-60)` }, word);
        });
        weights.forEach((_, i) => {
          const place = { x: side + cell * (i % n), y: side + cell * Math.floor(i / n) };
          element(element(svg, "rect", { ...place, width: cell - 1, height: cell - 1, class: "weight" }), "title", {});
        });
      }
      svg.querySelectorAll("rect").forEach((rect, i) => {
        rect.setAttribute("fill-opacity", Math.sqrt(weights[i] / 1000).toFixed(3));
        rect.firstChild.textContent = `${words[Math.floor(i / n)]} looks at ${words[i % n]}: ${(weights[i] / 10).toFixed(1)} %`;
      });
    }
  }

  function show() {
    const at = Number(slider.value), temperature = data.temperatures[at], found = chosen();
    find("temperature-value").textContent = temperature;
    slider.setAttribute("aria-valuetext", `temperature ${temperature}`);
    const [softmax, ours] = found.map(({ rows }) => rows[at]), apart = ours.entropy - softmax.entropy;
    const way = Math.abs(apart) < 0.05 ? "as concentrated as" : apart > 0 ? "more even than" : "more concentrated than";
    find("explorer-said").textContent =
      `At temperature ${temperature}, a row of softmax attention is like an even spread over ${Math.round(2 ** softmax.entropy)} of ` +
      `${data.length} tokens, one of LLN over ${Math.round(2 ** ours.entropy)}: it is ${way} softmax (${apart >= 0 ? "+" : ""}${apart.toFixed(2)} bits).`;
    legend();
    histogram(found, at);
    curve("entropy", "entropy", Math.ceil(data.most * 1.05), [0, 2, 4, 6, 8].filter((t) => t <= data.most), found, at);
    curve("gap", "gap", 1, [0, 0.25, 0.5, 0.75, 1], found, at);
    table(found, at);
    maps(at);
  }

  for (const control of [slider, dim, matching]) control.addEventListener("input", show);
  show();
})();

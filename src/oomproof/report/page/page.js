"use strict";
// Everything here that came from a script or a file goes into the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const small = matchMedia("(max-width: 600px)");
  const KIB = 1024, MIB = KIB ** 2, GIB = KIB ** 3;

  function make(tag, text, attributes) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    return element;
  }
  function digits(number, places) {
    const scaled = number * 10 ** places; // a half goes to the even digit, as in the rest of the page
    if (Math.abs(scaled % 1) === 0.5) number = (2 * Math.round(scaled / 2)) / 10 ** places;
    const [whole, rest] = number.toFixed(places).split("."); // toLocaleString takes longer than all the rest
    return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? "." + rest : "");
  }
  function size(bytes) {
    const magnitude = Math.abs(bytes);
    if (magnitude >= GIB - 0.05 * MIB) return digits(bytes / GIB, 2) + " GiB";
    if (magnitude >= MIB - 0.05 * KIB) return digits(bytes / MIB, 1) + " MiB";
    return magnitude >= KIB ? digits(bytes / KIB, 1) + " KiB" : bytes + " B";
  }
  function share(part, whole) {
    const percent = whole ? (100 * part) / whole : 0;
    return percent > 0 && percent < 0.5 ? "<1 %" : Math.round(percent) + " %";
  }
  // Plotly reads a little markup in labels: what is not meant as such is written as entities.
  const plain = (text) =>
    text.replace(/[\u0000-\u001f\u007f]/g, "\ufffd").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // Of a qualified name or a path the end says the most.
  const cut = (text, most) => (text.length > most ? "…" + text.slice(-most) : text);
  const baseName = (frame) => {
    const [place, ...rest] = frame.split(" ");
    return [place.slice(place.lastIndexOf("/") + 1), ...rest].join(" ");
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset" };
  function layout(more) {
    return Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: style("--ink") },
      hoverlabel: { bgcolor: style("--sheet"), bordercolor: style("--quiet"), font: { color: style("--ink"), size: 13 }, align: "left" },
    }, more);
  }
  const redraws = [];
  function hide(id) {
    $(id).hidden = true;
    const link = document.querySelector(`nav a[href="#${id}"]`);
    if (link) link.hidden = true;
  }
  for (const link of document.querySelectorAll("nav a")) {
    if (!document.querySelector(link.getAttribute("href"))) link.hidden = true;
  }

  // ---- The curve over the steps
  const curve = data.curve;
  const shown = new Map(); // category or line -> whether it is drawn
  let drawn = [];
  let range = null; // of events; null: all
  if (curve) startCurve();
  else hide("timeline");

  function unit() {
    const most = Math.max(...curve.reserved, data.allocated);
    return most >= GIB ? [GIB, "GiB"] : most >= MIB ? [MIB, "MiB"] : [KIB, "KiB"];
  }
  function startCurve() {
    data.categories.forEach((category, i) => {
      if (curve.bytes[i].some((bytes) => bytes > 0)) drawn.push(i);
    });
    const most = Math.max(...curve.reserved, data.allocated);
    const limitNear = data.limit && data.limit <= 1.6 * most;
    for (const i of drawn) shown.set(i, true);
    shown.set("reserved", true);
    if (data.limit) shown.set("limit", Boolean(limitNear));
    if (curve.of > curve.x.length) {
      $("thinned").textContent = ` ${curve.x.length.toLocaleString("en-US")} of ${curve.of.toLocaleString("en-US")} points are drawn; every peak is among them.`;
    }
    zoomButtons();
    read(curve.peak);
  }
  function stepRanges() {
    const found = [];
    for (const [step, , first, last] of curve.spans) {
      if (step === null) continue;
      const before = found[found.length - 1];
      if (before && before.step === step) before.last = last;
      else found.push({ step, first, last });
    }
    return found;
  }
  function zoomButtons() {
    const ranges = stepRanges();
    if (ranges.length < 2) return;
    const box = document.querySelector(".zoom");
    const add = (label, to) => {
      const button = make("button", label, { type: "button", "aria-pressed": String(to === null) });
      button.addEventListener("click", () => {
        for (const other of box.children) other.setAttribute("aria-pressed", String(other === button));
        range = to;
        if (window.Plotly) drawCurve();
      });
      box.append(button);
    };
    add("All steps", null);
    const top = ranges.findIndex(({ step }) => step === curve.step[curve.peak]);
    const few = small.matches ? 3 : 8;
    const chosen = ranges.length <= few ? ranges.keys() : [0, 1, ...(few > 3 ? [2] : []), top, ...(few > 3 ? [ranges.length - 1] : [])];
    for (const i of [...new Set(chosen)].filter((i) => i >= 0).sort((a, b) => a - b)) {
      const { step, first, last } = ranges[i];
      const edge = Math.max(1, (last - first) * 0.01);
      add(`Step ${step}`, [first - edge, last + edge]);
    }
  }
  let points = { x: curve ? curve.x : [], at: curve ? curve.x.map((_, i) => i) : [] }; // what is drawn: events, and which points
  // Where there are more points than pixels, each column of pixels has its highest, so that no peak is a faint line.
  function choosePoints() {
    const [from, to] = range || [curve.x[0], curve.x[curve.x.length - 1]];
    const pixels = Math.max(100, $("curve").clientWidth - 70);
    const first = nearest(from, curve.x), last = Math.min(curve.x.length - 1, nearest(to, curve.x) + 1);
    points = { x: [], at: [] };
    if (last - first < 1.5 * pixels) {
      for (let i = first; i <= last; i++) { points.x.push(curve.x[i]); points.at.push(i); }
      return;
    }
    const total = (i) => drawn.reduce((sum, category) => sum + (shown.get(category) ? curve.bytes[category][i] : 0), 0);
    let column = -1, most = 0;
    for (let i = first; i <= last; i++) {
      const here = Math.max(0, Math.floor(((curve.x[i] - from) / (to - from)) * pixels));
      const size = total(i);
      if (here !== column) {
        column = here;
        points.x.push(from + (here / pixels) * (to - from));
        points.at.push(i);
        most = size;
      } else if (size > most) {
        points.at[points.at.length - 1] = i;
        most = size;
      }
    }
    points.x.push(Math.max(to, points.x[points.x.length - 1]));
    points.at.push(last);
  }
  function drawCurve() {
    const [one] = unit();
    choosePoints();
    const traces = drawn.filter((i) => shown.get(i)).map((i) => ({
      x: points.x, y: points.at.map((at) => curve.bytes[i][at] / one), name: data.categories[i].name, type: "scatter",
      mode: "lines", stackgroup: "all", hoverinfo: "none", line: { width: 0, shape: "hv" },
      fillcolor: data.categories[i].colour,
    }));
    if (shown.get("reserved")) {
      traces.push({
        x: points.x, y: points.at.map((at) => curve.reserved[at] / one), type: "scatter", mode: "lines", hoverinfo: "none",
        line: { width: 2, color: style("--ink"), shape: "hv" },
      });
    }
    if (shown.get("limit")) {
      traces.push({
        x: [curve.x[0], curve.x[curve.x.length - 1]], y: [data.limit / one, data.limit / one], type: "scatter",
        mode: "lines", hoverinfo: "none", line: { width: 2, color: style("--bad"), dash: "dash" },
      });
    }
    const name = unit()[1];
    Plotly.react("curve", traces, layout({
      hovermode: "x", dragmode: small.matches ? false : "zoom", margin: { l: small.matches ? 46 : 58, r: 10, t: 44, b: 34 },
      xaxis: { range: range ? [...range] : [curve.x[0], curve.x[curve.x.length - 1]], showgrid: false, zeroline: false, tickformat: ",d", nticks: small.matches ? 4 : 10, showspikes: true, spikemode: "across", spikethickness: 1, spikecolor: style("--quiet"), spikedash: "solid", color: style("--quiet") },
      yaxis: { title: { text: name, standoff: 6 }, rangemode: "tozero", gridcolor: style("--grid"), zeroline: false, fixedrange: true, color: style("--quiet"), automargin: true },
      ...marks(range),
    }), CONFIG);
    const chart = $("curve");
    if (!chart.dataset.listens) {
      chart.dataset.listens = "1";
      chart.on("plotly_hover", (event) => read(points.at[nearest(event.xvals ? event.xvals[0] : event.points[0].x, points.x)]));
      chart.on("plotly_unhover", () => read(curve.peak));
      chart.on("plotly_relayout", (change) => {
        if (!("xaxis.range[0]" in change || "xaxis.range" in change || "xaxis.autorange" in change)) return;
        const axis = chart.layout.xaxis;
        range = change["xaxis.autorange"] ? null : axis.range.slice();
        setTimeout(drawCurve);
      });
      addEventListener("resize", drawCurve);
    }
  }
  function nearest(x, events) {
    let low = 0, high = events.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (events[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  }
  // Where steps begin, the phases above the plot, and the peak: labels only where there is room for them.
  function marks(view) {
    const [from, to] = view || [curve.x[0], curve.x[curve.x.length - 1]];
    const pixels = Math.max(1, $("curve").clientWidth - 70);
    const at = (event) => ((event - from) / (to - from)) * pixels;
    const shapes = [], annotations = [];
    const tints = { forward: "#63a84c", backward: "#b07bc0", optimizer: "#2fa5a0", init: "#7f93a8" };
    const band = { forward: "forward", backward: "backward", optimizer: "optimizer", init: "init" };
    const font = (colour) => ({ size: 11, color: colour });
    let free = -Infinity;
    const visible = curve.spans.filter((span) => span[3] >= from && span[2] <= to);
    const crowded = visible.length > pixels / 6;
    if (!crowded) visible.forEach(([, phase, first, last], i) => {
      const name = curve.phases[phase];
      const next = visible[i + 1];
      const left = Math.max(first, from), right = Math.min(next ? next[2] : last, to);
      const wide = at(right) - at(left);
      if (!tints[name] || wide < 1.5) return;
      shapes.push({ type: "rect", xref: "x", yref: "paper", x0: left, x1: right, y0: 1.012, y1: 1.03, fillcolor: tints[name], opacity: 0.85, line: { width: 0 } });
      const label = wide > name.length * 7.4 ? band[name] : wide > 26 ? { forward: "fwd", backward: "bwd", optimizer: "opt", init: "init" }[name] : null;
      if (label) annotations.push({ x: (left + right) / 2, xref: "x", y: 1.025, yref: "paper", yanchor: "bottom", text: label, showarrow: false, font: font(style("--quiet")) });
    });
    const steps = stepRanges().filter(({ first }) => first >= from && first <= to);
    for (const { step, first } of steps) {
      const text = `step ${step}`;
      const labelled = at(first) >= free && at(first) + text.length * 7 < pixels + 8;
      if (!labelled && steps.length > pixels / 30) continue; // more lines than anybody can tell apart
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: first, x1: first, y0: 0, y1: 1.1, line: { width: 1, color: style("--quiet"), dash: "dot" } });
      if (labelled) {
        annotations.push({ x: first, xref: "x", y: 1.075, yref: "paper", xanchor: "left", yanchor: "bottom", text, showarrow: false, font: font(style("--ink")) });
        free = at(first) + text.length * 7 + 10;
      }
    }
    const top = curve.x[curve.peak];
    if (top >= from && top <= to) {
      const [one] = unit();
      const sum = drawn.reduce((total, i) => total + curve.bytes[i][curve.peak], 0);
      const left = at(top) > pixels / 2;
      annotations.push({ x: top, y: sum / one, xref: "x", yref: "y", text: `<b>peak ${size(data.allocated)}</b>`, showarrow: true, arrowhead: 2, arrowsize: 0.9, arrowwidth: 1.2, arrowcolor: style("--ink"), ax: left ? -24 : 24, ay: 26, xanchor: left ? "right" : "left", font: { size: 12, color: style("--ink") }, bgcolor: style("--sheet"), opacity: 0.92, borderpad: 3 });
    }
    return { shapes, annotations };
  }
  // The legend shows the sizes at the point under the pointer, at the peak when there is none.
  function read(i) {
    const box = document.querySelector(".legend");
    const sum = drawn.reduce((total, category) => total + curve.bytes[category][i], 0);
    const where = [curve.step[i] === null ? "" : `step ${curve.step[i]}`, curve.phases[curve.phase[i]] || ""].filter(Boolean).join(", ");
    document.querySelector("#timeline .readout").textContent =
      `${i === curve.peak ? "At the peak" : "Here"}: ${size(i === curve.peak ? data.allocated : sum)} allocated${where ? ", " + where : ""}`;
    const entries = drawn.map((category) => [category, data.categories[category].name, data.categories[category].colour, curve.bytes[category][i], false]);
    entries.push(["reserved", "reserved", style("--ink"), curve.reserved[i], true]);
    if (data.limit) entries.push(["limit", "the GPU's memory", style("--bad"), data.limit, true]);
    if (box.children.length === entries.length) {
      entries.forEach((entry, n) => (box.children[n].lastChild.textContent = size(entry[3])));
      return;
    }
    box.replaceChildren(...entries.map(([key, name, colour, bytes, line]) => {
      const button = make("button", null, { type: "button", "aria-pressed": String(shown.get(key)) });
      const mark = make("i", null, line ? { class: "line" } : {});
      mark.style[line ? "borderTopColor" : "background"] = colour;
      button.append(mark, make("span", name), make("b", size(bytes)));
      button.addEventListener("click", () => {
        shown.set(key, !shown.get(key));
        button.setAttribute("aria-pressed", String(shown.get(key)));
        if (window.Plotly) drawCurve();
      });
      return button;
    }));
  }

  // ---- Where the peak comes from
  const ORDERS = [["module", "By module"], ["stack", "By stack"]].filter(([key]) => data.trees[key]);
  let by = ORDERS.length ? ORDERS[0][0] : null;
  let as = "chart";
  const told = (tree, i) => tree.categories[i].slice(0, 4)
    .map(([category, bytes]) => `${data.categories[category].name} ${share(bytes, tree.bytes[i])}`).join(", ");
  const levels = {}; // chart -> the box that fills it
  function boxes(tree, type, id, more) {
    const whole = tree.bytes[Number(levels[id] || 0)];
    const own = (i) => tree.categories[i].length > 0 && tree.categories[i][0][1] >= 0.95 * tree.bytes[i];
    const wide = (i) => tree.bytes[i] > (type === "icicle" ? 0.06 : 0.012) * whole;
    // Of joined frames the innermost says the most; the others are in the hover.
    const label = (name) => (name.includes(":") ? baseName(name.split(", from ")[0]) : name);
    const colour = (i) => (own(i) ? data.categories[tree.categories[i][0][0]].colour : style("--branch"));
    const inside = tree.names.map((_, i) => (own(i) ? "#10151c" : style("--ink")));
    return Object.assign({
      type, ids: tree.names.map((_, i) => String(i)), labels: tree.names.map((name, i) => plain(cut(label(wide(i) ? name : name.replace(/ \(.*\)$/, "") || name), 60))), level: levels[id] || "",
      parents: tree.parents.map((i) => (i < 0 ? "" : String(i))), values: tree.bytes, branchvalues: "total", sort: false,
      marker: { colors: tree.names.map((_, i) => colour(i)), line: { width: 1, color: style("--sheet") } }, leaf: { opacity: 1 },
      text: tree.bytes.map(size), insidetextfont: { size: 12, color: inside }, outsidetextfont: { color: style("--ink") },
      // In a narrow box there is room for the name alone.
      texttemplate: tree.names.map((_, i) => (wide(i) ? "%{label}<br>%{text}" : "%{label}")),
      customdata: tree.names.map((name, i) => [
        plain(wrapped(name)), size(tree.bytes[i]), share(tree.bytes[i], tree.bytes[0]), plain(told(tree, i)), tree.blocks[i] ? `<br>${digits(tree.blocks[i], 0)} blocks` : "",
      ]),
      hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]}, %{customdata[2]}<br>%{customdata[3]}%{customdata[4]}<extra></extra>",
    }, more);
  }
  function drawBoxes(tree, type, id, more) {
    Plotly.react(id, [boxes(tree, type, id, Object.assign({
      pathbar: { visible: true, thickness: 26, side: "top", textfont: { size: 12 } },
    }, more))], layout({ margin: { l: 0, r: 0, t: levels[id] ? 30 : 2, b: 4 }, uniformtext: { minsize: 10, mode: "hide" } }), CONFIG);
    const chart = $(id);
    if (chart.dataset.listens) return;
    chart.dataset.listens = "1";
    chart.on(`plotly_${type}click`, (event) => {
      if (event.nextLevel === undefined) return false;
      levels[id] = event.nextLevel === "0" ? "" : event.nextLevel;
      setTimeout(id === "icicle" ? drawIcicle : drawTreemap);
      return false;
    });
  }
  function wrapped(text) {
    const most = small.matches ? 42 : 90;
    return text.length <= most ? text : text.slice(0, most / 2) + " … " + text.slice(-most / 2);
  }
  function drawIcicle() {
    const tree = data.trees[by];
    $("icicle").hidden = as === "list";
    $("icicle-help").hidden = as === "list";
    $("list").hidden = as === "chart";
    if (as === "list") return drawList(tree);
    if (!window.Plotly) return;
    drawBoxes(tree, "icicle", "icicle", {
      textposition: "middle center", tiling: { orientation: "v", pad: 1 }, maxdepth: Math.min(depthBelow(tree, Number(levels.icicle || 0)), small.matches ? 6 : 9),
    });
  }
  function depthBelow(tree, top) {
    const depth = new Map([[top, 1]]); // parents come before their children
    tree.parents.forEach((parent, i) => {
      if (depth.has(parent) && tree.bytes[i] > 0.005 * tree.bytes[top]) depth.set(i, depth.get(parent) + 1);
    });
    return Math.max(...depth.values());
  }
  function drawList(tree) {
    const below = new Map();
    tree.parents.forEach((parent, i) => below.set(parent, [...(below.get(parent) || []), i]));
    function row(i, open) {
      const children = below.get(i);
      const line = children ? make("summary") : make("div", null, { class: "leaf" });
      line.append(make("b", size(tree.bytes[i])), tree.names[i], make("span", `${share(tree.bytes[i], tree.bytes[0])} · ${told(tree, i)}`));
      if (!children) return line;
      const box = make("details");
      box.append(line);
      const fill = () => { if (box.children.length === 1) box.append(...children.map((child) => row(child, false))); };
      box.addEventListener("toggle", fill);
      if (open) { fill(); box.open = true; }
      return box;
    }
    $("list").replaceChildren(row(0, true));
  }
  for (const [key, label] of ORDERS) {
    const button = make("button", label, { type: "button", "aria-pressed": String(key === by), "data-by": key });
    button.addEventListener("click", () => { by = key; levels.icicle = ""; press($("by"), button); drawIcicle(); });
    $("by").append(button);
  }
  for (const button of $("as").children) {
    button.addEventListener("click", () => { as = button.dataset.as; press($("as"), button); drawIcicle(); });
  }
  function press(box, pressed) {
    for (const button of box.children) button.setAttribute("aria-pressed", String(button === pressed));
  }
  function drawTreemap() {
    drawBoxes(data.trees.states, "treemap", "treemap", {
      textposition: "top left", tiling: { pad: 2 }, maxdepth: 5,
    });
  }
  const waiting = [];
  function drawNext() { // one at a time: the first is on the screen before the next is begun
    waiting[0]();
    redraws.push(waiting.shift());
    if (waiting.length) requestAnimationFrame(() => setTimeout(drawNext));
  }
  // Charts below the first screen are drawn when they are about to be seen.
  function later(id, draw) {
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      waiting.push(draw);
      if (waiting.length === 1) setTimeout(drawNext);
    }, { rootMargin: "300px" });
    watch.observe($(id));
  }
  if (!by) hide("where");
  if (!data.trees.states) hide("states");
  // The text is there at once; the charts' library, of 5 MB, is run after it has been painted.
  function startCharts() {
    const library = document.createElement("script");
    library.textContent = $("plotly").textContent; // the policy has its digest
    document.head.append(library);
    $("plotly").remove();
    if (curve) later("timeline", drawCurve);
    if (by) later("where", drawIcicle);
    if (data.trees.states) later("states", drawTreemap);
    document.documentElement.dataset.charts = String(Math.round(performance.now()));
  }

  // ---- The blocks
  const table = data.blocks;
  const word = (row, column) => table.texts[row[column]];
  const COLUMNS = [
    ["size", (r) => r[0], (r) => size(r[0]), "number keep"],
    ["category", (r) => data.categories[r[1]].name, null, "keep"],
    ["what", (r) => word(r, 2) || (word(r, 5) ? "in " + word(r, 5) : ""), null, "what"],
    ["shape", (r) => word(r, 3), null, "wide keep"],
    ["dtype", (r) => word(r, 4), null, "wide keep"],
    ["born", (r) => r[9], (r) => word(r, 6), "wide keep"],
    ["freed", (r) => word(r, 7), null, "wide keep"],
    ["line", (r) => word(r, 8).split("\n")[0], null, "line"],
  ].filter(([name, value, show]) => ["size", "line"].includes(name) || table.rows.some((r) => !["", "unknown", "later", "never"].includes((show || value)(r))));
  let order = [COLUMNS[0], -1];
  const few = small.matches ? 20 : 40;
  let most = few;
  function found() {
    const wanted = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = table.rows.filter((row) => {
      const text = [data.categories[row[1]].name, ...[2, 3, 4, 5, 6, 7, 8].map((column) => word(row, column))].join("\n").toLowerCase();
      return wanted.every((part) => text.includes(part));
    });
    const [[, value], way] = order;
    return rows.sort((a, b) => {
      const x = value(a), y = value(b);
      return way * (x < y ? -1 : x > y ? 1 : 0) || b[0] - a[0];
    });
  }
  function drawRows() {
    const rows = found();
    const sum = rows.reduce((total, row) => total + row[0], 0);
    const parts = [`${rows.length.toLocaleString("en-US")} blocks, ${size(sum)}`];
    if (table.left) parts.push(`${(table.all - table.rows.length).toLocaleString("en-US")} smaller ones, ${table.left}, are not in this page`);
    if (table.rounding) parts.push(`rounding ${table.rounding}`);
    $("found").textContent = parts.join(" · ");
    document.querySelector("#rows tbody").replaceChildren(...rows.slice(0, most).map((row) => {
      const line = make("tr");
      for (const [name, value, show, kind] of COLUMNS) {
        const cell = make("td", null, { class: kind });
        const text = (show || value)(row);
        if (name === "category") {
          const mark = make("i");
          mark.style.background = data.categories[row[1]].colour;
          cell.append(mark, text);
        } else if (name === "line" && word(row, 8).includes("\n")) {
          const more = make("details");
          more.append(make("summary", baseName(text)), ...word(row, 8).split("\n").map((frame, n) => make("div", (n ? "from " : "") + frame)));
          cell.append(more);
        } else cell.textContent = text;
        line.append(cell);
      }
      return line;
    }));
    $("more").hidden = rows.length <= most;
    $("more").textContent = `Show ${Math.min(200, rows.length - most)} more`;
  }
  function drawHead() {
    const line = make("tr");
    for (const column of COLUMNS) {
      const cell = make("th", null, { scope: "col", class: column[3] });
      if (order[0] === column) cell.setAttribute("aria-sort", order[1] < 0 ? "descending" : "ascending");
      const button = make("button", column[0] + (order[0] === column ? (order[1] < 0 ? " ↓" : " ↑") : ""), { type: "button" });
      button.addEventListener("click", () => {
        order = [column, order[0] === column ? -order[1] : column[0] === "size" ? -1 : 1];
        drawHead();
        drawRows();
      });
      cell.append(button);
      line.append(cell);
    }
    document.querySelector("#rows thead").replaceChildren(line);
  }
  if (table.rows.length) {
    $("search").addEventListener("input", () => { most = few; drawRows(); });
    $("more").addEventListener("click", () => { most += 200; drawRows(); });
    drawHead();
    drawRows();
  } else hide("blocks");

  // ---- Commands, colours, print
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch { // a page from a file may not be allowed to: select it, so that Ctrl-C does it
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }
  const redraw = () => {
    if (curve) {
      document.querySelector(".legend").replaceChildren();
      read(curve.peak);
    }
    for (const draw of redraws) draw();
  };
  dark.addEventListener("change", redraw);
  small.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { document.documentElement.dataset.paper = ""; redraw(); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.paper; redraw(); });
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  requestAnimationFrame(() => setTimeout(startCharts));
})();

"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const GIB = 2 ** 30;
  const points = (name, rows, tone, symbol) => ({
    name, mode: "markers", type: "scatter",
    x: rows.map((row) => row.time), y: rows.map((row) => row.peak / GIB),
    text: rows.map((row) => escaped(row.label)),
    hovertemplate: "%{text}<br>%{y:.2f} GiB, %{x:.2f} x<extra></extra>",
    marker: { color: colour(tone), size: 10, symbol },
    error_x: {
      type: "data", symmetric: false, color: colour(tone), thickness: 1, width: 3,
      array: rows.map((row) => row.high - row.time), arrayminus: rows.map((row) => row.time - row.low),
    },
  });
  const line = data.points.filter((row) => row.frontier).sort((a, b) => a.time - b.time);
  const traces = [
    {
      name: "frontier", mode: "lines", type: "scatter", hoverinfo: "skip",
      x: line.map((row) => row.time), y: line.map((row) => row.peak / GIB), line: { color: colour("--quiet"), shape: "hv", width: 1 },
    },
    points("fits", data.points.filter((row) => row.fits && !row.winner), "--good", "circle"),
    points("does not fit", data.points.filter((row) => !row.fits), "--bad", "x"),
    points("chosen", data.points.filter((row) => row.winner), "--accent", "star"),
  ].filter((trace) => trace.x.length);
  const axis = { gridcolor: colour("--grid"), zeroline: false, color: colour("--quiet"), automargin: true };
  Plotly.newPlot("chart", traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 440, margin: { l: 60, r: 16, t: 12, b: 48 },
    font: { color: colour("--ink") }, legend: { orientation: "h", y: 1.08 },
    xaxis: Object.assign({ title: { text: "time of a step, to the script as it is" }, ticksuffix: " x" }, axis),
    yaxis: Object.assign({ title: { text: "device memory" }, ticksuffix: " GiB", rangemode: "tozero" }, axis),
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.memory / GIB, y1: data.memory / GIB, line: { color: colour("--bad"), dash: "dash", width: 1 } }],
    annotations: [{ xref: "paper", x: 1, xanchor: "right", y: data.memory / GIB, yanchor: "bottom", showarrow: false, text: escaped(data.gpu), font: { color: colour("--bad") } }],
  }, { responsive: true, displaylogo: false });
})();

"use strict";
// Draws the figures of reports and of the dashboard with uPlot, from JSON beside each of them. The static picture stays
// for print. Nothing is fetched and nothing is evaluated, so that a strict content security policy holds.
(function () {
  var COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666"];
  var DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];

  function format(value) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    var size = Math.abs(value);
    if (size !== 0 && (size >= 1e15 || size < 1e-4)) return value.toExponential(2);
    if (size >= 1e6) return (value / 1e6).toPrecision(4).replace(/\.?0+$/, "") + "M";
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  function style(name, fallback) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim() || fallback;
  }

  // One ascending column of x, and for each line columns as long as it: uPlot's form of data.
  function align(figure) {
    var seen = new Set();
    figure.lines.forEach(function (line) { line.xs.forEach(function (x) { seen.add(x); }); });
    var xs = Array.from(seen).sort(function (a, b) { return a - b; });
    var place = new Map(xs.map(function (x, index) { return [x, index]; }));
    function column(line, values) {
      var found = new Array(xs.length).fill(undefined);
      line.xs.forEach(function (x, index) { found[place.get(x)] = values[index]; });
      return found;
    }
    return {
      xs: xs,
      ys: figure.lines.map(function (line) { return column(line, line.ys); }),
      low: figure.lines.map(function (line) { return line.low.length ? column(line, line.low) : null; }),
      high: figure.lines.map(function (line) { return line.high.length ? column(line, line.high) : null; })
    };
  }

  function isLog(axis) { return axis.scale === "log2" || axis.scale === "log10"; }

  function range(axis, data, stacked) {
    return function (plot, low, high) {
      if (axis.scale === "categories") return [-0.6, axis.categories.length - 0.4];
      var values = [];
      data.forEach(function (column) {
        if (column) column.forEach(function (value) {
          if (value !== null && value !== undefined && isFinite(value) && !(isLog(axis) && value <= 0)) values.push(value);
        });
      });
      if (axis === plot.figure.x && axis.ticks.length) values = values.concat(axis.ticks);
      if (plot.zoomed && low !== null && high !== null && axis === plot.figure.x) return [low, high];
      if (!values.length) return isLog(axis) ? [1, 10] : [0, 1];
      var least = Math.min.apply(null, values), most = Math.max.apply(null, values);
      if (isLog(axis)) {
        var room = Math.max(1.1, Math.pow(most / least, 0.05));
        return [least / room, most * room];
      }
      if (axis.fromZero || stacked) least = Math.min(0, least);
      var span = most - least || Math.abs(most) || 1;
      return [least === 0 && (axis.fromZero || stacked) ? 0 : least - 0.06 * span, most + 0.08 * span];
    };
  }

  function axisOptions(axis, size) {
    var options = {
      label: axis.label, labelSize: 22, stroke: function () { return style("--text", "#222"); },
      grid: { stroke: function () { return style("--grid", "#ddd"); }, width: 1 },
      ticks: { stroke: function () { return style("--axis", "#888"); }, width: 1, size: 4 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif"
    };
    if (size) options.size = size;
    if (axis.scale === "categories") {
      if (axis.categories.some(function (name) { return name.length > 60 / axis.categories.length; })) {
        options.rotate = -24;
        options.size = 76;
      }
      options.splits = function () { return axis.categories.map(function (_, index) { return index; }); };
      options.values = function (plot, splits) {
        return splits.map(function (split) { return (axis.categories[split] || "").slice(0, 18); });
      };
    } else {
      if (axis.ticks.length > 1) options.splits = function (plot, index, low, high) {
        var shown = axis.ticks.filter(function (tick) { return tick >= low && tick <= high; });
        return shown.length > 1 ? shown : [low, high];
      };
      options.values = function (plot, splits) { return splits.map(format); };
      if (isLog(axis) && axis.ticks.length < 2) {
        options.splits = function (plot, index, low, high) { return decades(low, high); };
        options.filter = function (plot, splits) { return splits; };
      } else if (isLog(axis)) options.filter = function (plot, splits) { return splits; };
    }
    return options;
  }

  // Round numbers on a logarithmic axis, never fewer than two.
  function decades(low, high) {
    var sets = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]], found = [];
    for (var s = 0; s < sets.length && found.length < 3; s++) {
      found = [];
      for (var power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
        sets[s].forEach(function (factor) {
          var tick = factor * Math.pow(10, power);
          if (tick >= low && tick <= high) found.push(tick);
        });
    }
    if (found.length < 2) return [low, Math.sqrt(low * high), high];
    var step = Math.ceil(found.length / 8);
    return found.filter(function (_, index) { return index % step === 0; });
  }

  function intervals(figure, data) {
    return function (plot) {
      var context = plot.ctx;
      context.save();
      context.setLineDash([]);
      figure.lines.forEach(function (line, index) {
        if (!data.low[index] || !plot.series[index + 1].show) return;
        context.strokeStyle = COLORS[index % COLORS.length];
        context.lineWidth = devicePixelRatio;
        data.xs.forEach(function (x, place) {
          var low = data.low[index][place], high = data.high[index][place];
          if (low === null || low === undefined || high === null || high === undefined) return;
          if (isLog(figure.y) && low <= 0) low = plot.scales.y.min; // it has no end on such an axis
          var left = plot.valToPos(x, "x", true), wide = 4 * devicePixelRatio;
          var bottom = plot.valToPos(low, "y", true), top = plot.valToPos(high, "y", true);
          context.beginPath();
          context.moveTo(left, bottom); context.lineTo(left, top);
          context.moveTo(left - wide, bottom); context.lineTo(left + wide, bottom);
          context.moveTo(left - wide, top); context.lineTo(left + wide, top);
          context.stroke();
        });
      });
      context.restore();
    };
  }

  function stack(columns) {
    var sums = [];
    return columns.map(function (column) {
      return column.map(function (value, index) { return (sums[index] = (sums[index] || 0) + (value || 0)); });
    });
  }

  function seriesOptions(figure, line, index, raw) {
    var color = COLORS[index % COLORS.length], bars = figure.kind === "stack";
    var options = {
      label: line.label, stroke: color, width: 1.8, spanGaps: true,
      dash: line.reference ? [3, 4] : DASHES[Math.floor(index / COLORS.length) % DASHES.length],
      points: { show: figure.kind === "lines" && !line.reference && line.xs.length <= 60, size: 7, fill: color },
      value: function (plot, value, seriesIndex, dataIndex) {
        return dataIndex === null ? "–" : format(bars ? raw[dataIndex] : value);
      }
    };
    if (bars) {
      options.fill = line.blank ? function () { return style("--panel", "#f6f7f8"); } : index < COLORS.length ? color : color + "73";
      options.paths = uPlot.paths.bars({ size: [0.66, 70] });
      options.points = { show: false };
      options.width = 0;
    } else if (figure.kind === "lines" && figure.x.scale === "categories") {
      options.paths = function () { return null; };
      options.points = { show: true, size: 8, fill: color };
    }
    return options;
  }

  function draw(figure, target) {
    var data = align(figure), bars = figure.kind === "stack";
    var ys = bars ? stack(data.ys) : data.ys;
    var order = figure.lines.map(function (_, index) { return index; });
    if (bars) order.reverse(); // the highest sum first, so that lower ones stay in sight
    var options = {
      width: Math.max(280, target.clientWidth || 640), height: 300,
      scales: {
        x: { time: false, distr: isLog(figure.x) ? 3 : 1, log: figure.x.scale === "log2" ? 2 : 10,
             range: range(figure.x, [data.xs]) },
        y: { distr: isLog(figure.y) ? 3 : 1, log: figure.y.scale === "log2" ? 2 : 10,
             range: range(figure.y, ys.concat(data.low, data.high), bars) }
      },
      axes: [axisOptions(figure.x), axisOptions(figure.y, 64)],
      series: [{ label: figure.x.label, value: function (plot, value) {
        if (value === null || value === undefined) return "–";
        return figure.x.scale === "categories" ? figure.x.categories[value] : format(value);
      } }].concat(order.map(function (index) { return seriesOptions(figure, figure.lines[index], index, data.ys[index]); })),
      hooks: {
        init: [function (plot) { plot.figure = figure; }],
        setSelect: [function (plot) { plot.zoomed = true; }],
        draw: bars ? [] : [intervals(figure, data)]
      },
      legend: { live: true }, cursor: { drag: { x: figure.x.scale !== "categories", y: false } }
    };
    var plot = new uPlot(options, [data.xs].concat(order.map(function (index) { return ys[index]; })), target);
    plot.figure = figure;
    plot.over.addEventListener("dblclick", function () { plot.zoomed = false; });
    plot.root.querySelectorAll(".u-legend .u-series").forEach(function (row, index) {
      if (index === 0) return;
      row.tabIndex = 0; // by keyboard, too
      row.setAttribute("role", "button");
      row.setAttribute("aria-pressed", "true");
      var name = row.querySelector("th");
      row.addEventListener("keydown", function (event) {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        if (name) name.click();
      });
      row.addEventListener("click", function () {
        setTimeout(function () { row.setAttribute("aria-pressed", String(plot.series[index].show)); }, 0);
      });
    });
    plot.root.querySelectorAll("canvas").forEach(function (canvas) { canvas.setAttribute("aria-hidden", "true"); });
    return plot;
  }

  // Replaces the static picture of a figure by one that can be zoomed; on the screen only.
  function enliven(element) {
    var source = element.querySelector('script[type="application/json"]');
    var target = element.querySelector(".live");
    if (!source || !target || element.plot) return;
    element.classList.add("drawn");
    element.plot = draw(JSON.parse(source.textContent), target);
  }

  function resize() {
    document.querySelectorAll("figure.drawn").forEach(function (element) {
      var width = element.querySelector(".live").clientWidth;
      if (element.plot && width > 0 && Math.abs(width - element.plot.width) > 1)
        element.plot.setSize({ width: Math.max(280, width), height: 300 });
    });
  }

  function start() {
    var observer = new IntersectionObserver(function (entries) {
      entries.forEach(function (entry) { if (entry.isIntersecting) enliven(entry.target); });
    }, { rootMargin: "400px" });
    document.querySelectorAll("figure[data-figure]").forEach(function (element) { observer.observe(element); });
    window.addEventListener("resize", resize);
    window.addEventListener("beforeprint", function () {
      document.querySelectorAll("details").forEach(function (element) {
        element.dataset.was = element.open ? "open" : "";
        element.open = true;
      });
    });
    window.addEventListener("afterprint", function () {
      document.querySelectorAll("details").forEach(function (element) { element.open = element.dataset.was === "open"; });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () {
      document.querySelectorAll("figure.drawn").forEach(function (element) { if (element.plot) element.plot.redraw(); });
    });
    document.documentElement.classList.add("ready");
  }

  window.mlbenchFigures = { draw: draw, enliven: enliven };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();

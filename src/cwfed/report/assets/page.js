// Draws a report's plots from the JSON in the page. No network, no state outside the page.
"use strict";
(() => {
  const { groups, style, axes } = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d"]] };

  // Plotly reads labels as a kind of HTML; names come from data and must stay text.
  const text = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (value) => { const plain = String(value); return text(plain.length > 28 ? plain.slice(0, 27) + "…" : plain); };

  function layout(x, y, more = {}) {
    const ink = dark.matches ? "#e9eaec" : "#1b1b1b";
    const line = dark.matches ? "#3d424b" : "#d5d8dd";
    const axis = (title, extra) => ({ title: { text: title, standoff: 8 }, gridcolor: line, linecolor: line, zeroline: false, automargin: true, ...extra });
    const { xaxis, yaxis, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
      margin: { l: 55, r: 15, t: 28, b: 45 }, hoverlabel: { namelength: -1 },
      legend: { orientation: "h", y: -0.2, yanchor: "top" }, uirevision: "same",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink },
      xaxis: axis(x, xaxis), yaxis: axis(y, yaxis), ...rest,
    };
  }

  const line = (i) => ({ color: style.colours[i % style.colours.length], dash: style.dashes[i % style.dashes.length] });
  const symbol = (i) => style.symbols[i % style.symbols.length];

  function curves(group, y, x) {
    return group.methods.map((method, i) => {
      const found = method.series[y];
      return {
        name: short(method.label), x: found.x[x], y: found.y, mode: "lines+markers", line: line(i),
        marker: { symbol: symbol(i), size: 6, maxdisplayed: 20 }, visible: found.y.length ? true : "legendonly",
        error_y: found.std ? { type: "data", array: found.std, thickness: 0.8, width: 2 } : undefined,
        hovertemplate: `%{y:.4g}<extra>${text(method.label)}, ${text(axes.x[x])} %{x:.4g}</extra>`,
      };
    });
  }

  function clients(group) {
    return group.methods.map((method, i) => ({
      name: short(method.label), x: method.clients.id.map((c) => "client " + c), y: method.clients.accuracy, mode: "markers",
      marker: { color: line(i).color, symbol: symbol(i), size: 8 }, hovertemplate: `%{x}: %{y:.2f} %<extra>${text(method.label)}</extra>`,
    }));
  }

  function recalls(group) {
    return group.methods.flatMap((method, i) => method.recall === null ? [] : [{
      name: short(method.label), x: classNames(group), y: method.recall.map((v) => v === null ? null : 100 * v), mode: "markers",
      marker: { color: line(i).color, symbol: symbol(i), size: 8 }, hovertemplate: `class %{x}: %{y:.2f} %<extra>${text(method.label)}</extra>`,
    }]);
  }

  // Long labels may begin alike: places on an axis are numbers, the words stand beside them.
  const named = (labels) => ({ tickvals: labels.map((_, i) => i), ticktext: labels.map(short) });

  function gains(group, base) {
    const found = group.gains[base], others = Object.keys(found).map(Number);
    const ids = Object.keys(found[others[0]]);
    const rows = others.map((i) => ids.map((c) => c in found[i] ? found[i][c] : null));
    const top = Math.max(1, ...rows.flat().filter((v) => v !== null).map(Math.abs));
    const few = ids.length <= 30 && others.length <= 14 && window.innerWidth > 700; // room for numbers in the cells
    const labels = others.map((i) => group.methods[i].label);
    const trace = {
      type: "heatmap", z: rows, x: ids.map((c) => "client " + c), y: others.map((_, i) => i),
      zmin: -top, zmax: top, colorscale: style.diverging, colorbar: { title: { text: "points" }, thickness: 12 }, xgap: 1, ygap: 1,
      text: rows.map((row) => row.map((v) => v === null ? "" : (v > 0 ? "+" : "") + v.toFixed(0))), texttemplate: few ? "%{text}" : undefined,
      customdata: rows.map((row, i) => row.map(() => text(labels[i]))), hovertemplate: "%{customdata}, %{x}: %{z:+.1f} points<extra></extra>",
    };
    return [[trace], { autorange: "reversed", ...named(labels) }];
  }

  const heat = (z, x, y, hover, diverging) => {
    const top = diverging ? Math.max(1e-9, ...z.flat().filter((v) => v !== null).map(Math.abs)) : undefined;
    return [{
      type: "heatmap", z, x, y: y.map((name, i) => i), customdata: z.map((row, i) => row.map(() => y[i])), colorscale: diverging ? style.diverging : style.sequential, reversescale: false, hoverongaps: false,
      zmin: diverging ? -top : undefined, zmax: top, colorbar: { thickness: 10 }, hovertemplate: hover + ": %{z:.4g}<extra></extra>",
    }];
  };
  // Rows from top to bottom; some of the names, where there are too many to read.
  const rowsDown = (names) => {
    const step = Math.ceil(names.length / 12), some = names.map((_, i) => i).filter((i) => i % step === 0);
    return { autorange: "reversed", tickvals: some, ticktext: some.map((i) => names[i]) };
  };
  const counted = (rows) => rows.map((_, i) => i);
  const classNames = (group) => group.classes.map(text);

  function norms(group, method, what) {
    const found = method.portrait;
    if (what === "classes") return found.classes && { z: found.classes, names: counted(found.classes), of: "class model" };
    const absent = group.classes.map(() => null);
    const minus = (row, i) => row === null ? absent : row.map((v, k) => v - found.received[i][k]);
    if (what === "difference") return { z: found.trained.map(minus), names: found.clients, of: "client", diverging: true };
    return { z: found[what].map((row) => row === null ? absent : row), names: found.clients, of: "client" };
  }

  function spread(method) {
    const p = [], estimate = [];
    (method.portrait ? method.portrait.trained : []).forEach((row, i) => {
      if (row === null) return;
      const sum = row.reduce((a, b) => a + b, 0) || 1;
      row.forEach((v, k) => { p.push(method.portrait.distribution[i][k]); estimate.push(v / sum); });
    });
    return [
      { x: [0, 1], y: [0, 1], mode: "lines", line: { color: "#888", width: 1 }, hoverinfo: "skip", showlegend: false },
      { x: p, y: estimate, mode: "markers", marker: { color: dark.matches ? "#6db8f2" : style.colours[0], size: 5, opacity: 0.7 }, showlegend: false, hovertemplate: "p %{x:.3f}, p~ %{y:.3f}<extra></extra>" },
    ];
  }

  function bars(group, key) {
    const parts = [...new Set(group.methods.flatMap((m) => Object.keys(m[key])))];
    return parts.map((part, i) => ({
      type: "bar", name: text(part), x: group.methods.map((_, j) => j), y: group.methods.map((m) => m[key][part] || 0),
      customdata: group.methods.map((m) => text(m.label)), hovertemplate: "%{customdata}: %{y:.4s}<extra>" + text(part) + "</extra>",
      marker: { color: style.colours[i % style.colours.length], pattern: { shape: ["", "/", ".", "x", "-", "|"][i % 6] } },
    }));
  }

  function say(div, words) { Plotly.purge(div); div.textContent = words; div.classList.add("quiet"); }
  function show(div, traces, where) {
    if (!div.classList.contains("js-plotly-plot")) div.textContent = "";
    div.classList.remove("quiet");
    Plotly.react(div, traces, where, config);
  }

  function draw(section, group) {
    const find = (name) => section.querySelector(`[data-plot="${name}"]`);
    const chosen = (name) => section.querySelector(`[data-choice="${name}"]`).value;
    const y = chosen("y"), x = chosen("x");
    show(find("curves"), curves(group, y, x), layout(axes.x[x], axes.y[y], { xaxis: { exponentformat: "SI" } }));
    show(find("clients"), clients(group), layout("", axes.y.accuracy));
    const known = recalls(group);
    if (known.length) show(find("classes"), known, layout("class", "recall, %", { xaxis: { type: "category" } }));
    else say(find("classes"), "Not known: an earlier version made these runs, or they are of a real federation whose nodes do not tell their label histograms.");
    const base = chosen("baseline");
    if (Object.keys(group.gains[base]).length) {
      const [traces, yaxis] = gains(group, base);
      show(find("gains"), traces, layout("", "", { yaxis, margin: { l: 120, r: 10, t: 28, b: 60 } }));
    }
    const holders = counted(group.histogram);
    if (!holders.length) say(find("data"), "Who holds what is known to the clients of this federation only.");
    else show(find("data"), heat(group.histogram, classNames(group), holders, "client %{customdata}, class %{x}"), layout("class", "client", { yaxis: rowsDown(holders), xaxis: { type: "category" } }));
    const method = group.methods[Number(chosen("method"))], portrait = method.portrait;
    const unknown = "This run has no portrait of its models: an earlier version made it, a mixture overflowed, or it is of a real federation, whose server does not know the true distributions.";
    const seen = portrait && norms(group, method, chosen("norms"));
    if (seen) show(find("norms"), heat(seen.z, classNames(group), seen.names, seen.of + " %{customdata}, class %{x}", seen.diverging), layout("class", seen.of, { yaxis: rowsDown(seen.names), xaxis: { type: "category" } }));
    else say(find("norms"), portrait ? "This method has no class models." : unknown);
    if (portrait) show(find("spread"), spread(method), layout("p, true share of a class", "p~, read from the weights"));
    else say(find("spread"), unknown);
    const mixed = portrait && portrait.mixture;
    if (mixed && mixed.some((row) => row !== null)) {
      const whose = portrait.participants;
      show(find("mixture"), heat(mixed.map((row) => row || whose.map(() => null)), whose.map((c) => "client " + c), portrait.clients, "client %{customdata} has of %{x}"), layout("whose model", "client", { yaxis: rowsDown(portrait.clients), xaxis: { type: "category" } }));
    } else say(find("mixture"), portrait ? "No shares are known: the output layers are not made of the last round's uploads, or there were none, or too many." : unknown);
    const labels = named(group.methods.map((m) => m.label));
    show(find("traffic"), bars(group, "traffic"), layout("", "bytes", { barmode: "stack", xaxis: labels, yaxis: { exponentformat: "SI" } }));
    show(find("seconds"), bars(group, "seconds"), layout("", "seconds", { barmode: "stack", xaxis: labels }));
  }

  function sortable(table) {
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => { const cell = row.cells[column].dataset.value; return cell === undefined ? row.cells[column].textContent : cell === "" ? null : Number(cell); };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [one, two] = [value(a), value(b)];
        if (one === null || two === null) return (one === null) - (two === null); // what is not known comes last
        const order = typeof one === "number" ? one - two : one.localeCompare(two);
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows);
    }));
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  const sections = [...document.querySelectorAll("section[data-group]")].map((section) => [section, groups[Number(section.dataset.group)]]);
  for (const [section, group] of sections) {
    section.querySelectorAll("select").forEach((select) => select.addEventListener("change", () => draw(section, group)));
    draw(section, group);
  }
  dark.addEventListener("change", () => sections.forEach(([section, group]) => draw(section, group)));
})();

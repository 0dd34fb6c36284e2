// Draws a report's plots from the JSON in the page. No network, no state outside the page.
"use strict";
(() => {
  const { groups, style, axes } = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => dark.matches ? "dark" : "light";
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d"]] };

  // Plotly reads labels as a kind of HTML; names come from data and must stay text.
  const text = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (value, most = 36) => { const plain = String(value); return text(plain.length > most ? plain.slice(0, most - 1) + "…" : plain); };
  const largest = (rows) => Math.max(0, ...rows.map((row) => Math.max(0, ...row.filter((v) => v !== null).map(Math.abs))));

  // --- axes

  const steps = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000];
  const stepFor = (count, most) => steps.find((step) => count / step <= most) || Math.ceil(count / most);
  const fits = (div, pixels) => Math.max(2, Math.floor((div.clientWidth || 600) / pixels));
  const narrow = () => window.innerWidth <= 700;
  // Rounds and places are whole numbers.
  const whole = (div, values) => ({ dtick: stepFor(Math.max(1, ...values), Math.min(12, fits(div, 45))), tick0: 0, tickformat: "d" });
  // Places along an axis are numbers; names, which may be long or alike, stand beside some of them.
  const named = (names, most, letters) => {
    const step = stepFor(names.length, most), some = names.map((_, i) => i).filter((i) => i % step === 0);
    return { tickmode: "array", tickvals: some, ticktext: some.map((i) => short(names[i], letters)), range: [-0.5, names.length - 0.5] };
  };
  const classAxis = (div, group) => named(group.classes, fits(div, 22), 12);
  const down = (names, letters) => { const axis = named(names, 12, letters); return { ...axis, range: [...axis.range].reverse() }; };
  const bytes = (most) => [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => most >= size) || [1, "B"];

  // --- the frame of a plot: what it means stands above it, its legend below, and neither covers it

  function wrapped(words, letters) {
    const lines = [""];
    for (const word of words.split(" ")) {
      if (lines.at(-1).length + word.length > letters) lines.push("");
      lines[lines.length - 1] += (lines.at(-1) && " ") + word;
    }
    return lines;
  }

  function layout(div, x, y, { xaxis, yaxis, said = "", traces = [], height = 360, margin = {}, ...rest } = {}) {
    const ink = dark.matches ? "#e9eaec" : "#1b1b1b", line = dark.matches ? "#3d424b" : "#d5d8dd";
    const axis = (title, extra) => ({ title: { text: title, standoff: 8 }, gridcolor: line, linecolor: line, zeroline: false, automargin: true, ...extra });
    const lines = said ? wrapped(said, Math.max(24, Math.floor(((div.clientWidth || 600) - 170) / 6))) : [];
    const entries = traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => trace.name.length);
    const columns = Math.max(1, Math.floor(((div.clientWidth || 600) - 60) / (50 + 7 * Math.max(1, ...entries))));
    const rows = Math.ceil(entries.length / columns), above = 30 + 15 * lines.length, below = 50 + 20 * rows;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 }, hoverlabel: { namelength: -1 },
      height: height + above + below - 80, margin: { l: 55, r: 15, t: above, b: below, ...margin },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, traceorder: "normal" }, showlegend: rows > 0, uirevision: "same",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink },
      annotations: lines.length ? [{ text: lines.map(text).join("<br>"), xref: "paper", yref: "paper", x: 0, y: 1, yshift: 4, xanchor: "left", yanchor: "bottom", align: "left", showarrow: false, font: { size: 11 } }] : [],
      xaxis: axis(x, xaxis), yaxis: axis(y, yaxis), ...rest,
    };
  }

  const lineOf = (look) => ({ color: look.colour, dash: look.dash });
  const pale = (colour) => `rgba(${[1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)).join(",")},0.15)`;

  // --- lines and markers: a method has its colour everywhere

  function curves(group, y, x) {
    const most = Math.max(0, ...group.methods.flatMap((method) => method.series[y].x[x])), [size, unit] = x === "bytes" ? bytes(most) : [1, ""];
    const lines = [], bands = [];
    group.methods.forEach((method, i) => {
      const found = method.series[y], label = group.labels[y][i], at = found.x[x].map((v) => v / size), of = `method ${i}`;
      lines.push({
        name: short(label), x: at, y: found.y, mode: "lines+markers", line: lineOf(method.look), legendgroup: of,
        marker: { symbol: method.look.symbol, size: 6, maxdisplayed: 20 }, visible: found.y.length ? true : "legendonly",
        hovertemplate: `%{y:.4g}<extra>${text(label)}, ${text(axes.x[x])} %{x:.4g} ${unit}</extra>`,
      });
      if (found.std) bands.push({
        x: [...at, ...[...at].reverse()], y: [...found.y.map((v, k) => v + found.std[k]), ...found.y.map((v, k) => v - found.std[k]).reverse()],
        fill: "toself", fillcolor: pale(method.look.colour), mode: "none", hoverinfo: "skip", showlegend: false, legendgroup: of,
      });
    });
    return { traces: [...lines, ...bands], unit, rounds: lines.flatMap((line) => line.x) };
  }

  // Markers of several methods stand side by side, not on top of each other.
  const beside = (i, count) => count < 2 ? 0 : Math.min(0.7, 0.2 * (count - 1)) * (i / (count - 1) - 0.5);

  function clients(group) {
    const ids = [...new Set(group.methods.flatMap((method) => method.clients.at))].sort((a, b) => a - b), count = group.methods.length;
    return [ids, group.methods.map((method, i) => {
      const common = { name: short(group.labels.accuracy[i]), y: method.clients.values, customdata: method.clients.at };
      const hover = (what) => `${what} %{customdata}: %{y:.2f} %<extra>${text(group.labels.accuracy[i])}</extra>`;
      if (group.many) return { ...common, x: method.clients.at, mode: "lines", line: lineOf(method.look), hovertemplate: hover("place") };
      return { ...common, x: method.clients.at.map((c) => ids.indexOf(c) + beside(i, count)), mode: "markers", marker: { color: method.look.colour, symbol: method.look.symbol, size: 7 }, hovertemplate: hover("client") };
    })];
  }

  function recalls(group) {
    return group.methods.flatMap((method, i) => method.recall === null ? [] : [{
      name: short(group.labels.accuracy[i]), x: method.recall.map((_, k) => k + beside(i, group.methods.length)), y: method.recall.map((v) => v === null ? null : 100 * v), mode: "markers",
      marker: { color: method.look.colour, symbol: method.look.symbol, size: 7 }, customdata: group.classes.map(text),
      hovertemplate: `class %{customdata}: %{y:.2f} %<extra>${text(group.labels.accuracy[i])}</extra>`,
    }]);
  }

  function sortedGains(group, found) {
    return Object.entries(found).map(([i, gained]) => ({
      name: short(group.labels.accuracy[i]), x: gained.at, y: gained.values, mode: "lines", line: lineOf(group.methods[i].look),
      hovertemplate: `place %{x}: %{y:+.1f} points<extra>${text(group.labels.accuracy[i])}</extra>`,
    }));
  }

  function spread(method) {
    const { p, estimate } = method.portrait.dots;
    return [
      { x: [0, 1], y: [0, 1], mode: "lines", line: { color: "#888", width: 1 }, hoverinfo: "skip", showlegend: false },
      { x: p, y: estimate, mode: "markers", marker: { color: method.look.colour, size: 5, opacity: 0.7 }, showlegend: false, hovertemplate: "p %{x:.3f}, p~ %{y:.3f}<extra></extra>" },
    ];
  }

  // --- heat maps: from 0, or the same on both sides of it; nothing has the colour of the page

  function heat(z, unit, rows, columns, hover, { diverging = false, top = 0, ...more } = {}) {
    const most = top || largest(z) || 1, scale = diverging ? style.diverging : style.sequential;
    const words = z.map((row, i) => row.map((_, k) => [text(rows[i]), text(columns[k])]));
    return [{
      type: "heatmap", z, customdata: words, colorscale: scale[theme()], zmin: diverging ? -most : 0, zmax: most, hoverongaps: false,
      colorbar: { thickness: 12, title: { text: unit, side: unit.length > 8 ? "right" : "top" } }, hovertemplate: hover + "<extra></extra>", ...more,
    }];
  }

  function gains(group, found, div) {
    const others = Object.keys(found).map(Number), ids = found[others[0]].at, labels = others.map((i) => group.labels.accuracy[i]);
    const rows = others.map((i) => ids.map((c) => { const place = found[i].at.indexOf(c); return place < 0 ? null : found[i].values[place]; }));
    const few = ids.length <= 30 && others.length <= 14 && !narrow(); // room for numbers in the cells
    const texts = rows.map((row) => row.map((v) => v === null ? "" : (v > 0 ? "+" : "") + v.toFixed(0)));
    const more = { diverging: true, top: Math.max(1, largest(rows)), xgap: 1, ygap: 1, text: texts, texttemplate: few ? "%{text}" : undefined };
    const traces = heat(rows, "points", labels, ids, "%{customdata[0]}, client %{customdata[1]}: %{z:+.1f} points", more);
    const height = 130 + 26 * others.length;
    if (!narrow() && others.length > 3) return [traces, { xaxis: named(ids, fits(div, 30)), yaxis: down(labels, 36), height }];
    // Beside few rows a colour bar has no room for its numbers, and the names take half of a phone: it goes below.
    Object.assign(traces[0].colorbar, { orientation: "h", x: 0, xanchor: "left", xref: "container", y: 0, yanchor: "bottom", yref: "container", thickness: 10, title: { text: "points", side: "right" } });
    const across = narrow() ? { ...named(ids, fits(div, 60)), tickangle: 0 } : named(ids, fits(div, 30));
    if (!narrow()) Object.assign(traces[0].colorbar, { lenmode: "pixels", len: 400 });
    return [traces, { xaxis: across, yaxis: down(labels, narrow() ? 16 : 36), height: height + 50, margin: { b: 110 } }];
  }

  function norms(group, portrait, what) {
    const absent = group.classes.map(() => null), known = (rows) => rows.map((row) => row === null ? absent : row);
    if (what === "classes") return portrait.classes && { z: portrait.classes, names: group.classes, of: "class model" };
    const minus = (row, i) => row === null ? absent : row.map((v, k) => v - portrait.received[i][k]);
    if (what === "difference") return { z: portrait.trained.map(minus), names: portrait.clients, of: "client", diverging: true };
    return { z: known(portrait[what]), names: portrait.clients, of: "client" };
  }
  // The kinds of norms of a method have one scale, so that they can be compared.
  const largestNorm = (portrait) => Math.max(...[portrait.received, portrait.trained.filter((row) => row !== null), portrait.classes || []].map(largest));

  // --- bars

  function bars(group, key, size, unit) {
    const parts = [...new Set(group.methods.flatMap((m) => Object.keys(m[key])))];
    return parts.map((part, i) => ({
      type: "bar", orientation: "h", name: text(part), y: group.methods.map((_, j) => j), x: group.methods.map((m) => (m[key][part] || 0) / size),
      customdata: group.methods.map((m) => text(m.label)), hovertemplate: `%{customdata}: %{x:.4g} ${unit}<extra>${text(part)}</extra>`,
      marker: { color: style.parts[i % style.parts.length], pattern: { shape: ["", "/", ".", "x", "-", "|"][i % 6] }, line: { color: dark.matches ? "#14161a" : "#ffffff", width: 1 } },
    }));
  }

  // --- the page

  function say(div, words) { Plotly.purge(div); div.textContent = words; div.classList.add("quiet"); }
  function show(div, traces, where) {
    if (!div.classList.contains("js-plotly-plot")) div.textContent = "";
    div.classList.remove("quiet");
    Plotly.react(div, traces, where, config);
  }

  function draw(section, group) {
    const find = (name) => section.querySelector(`[data-plot="${name}"]`);
    const chosen = (name) => section.querySelector(`[data-choice="${name}"]`).value;
    const frame = (name, x, y, more) => layout(find(name), x, y, more);
    const sentences = (...found) => found.filter(Boolean).join(" ");
    const sorted = (of) => `${of.toLocaleString("en")} clients, from the worst to the best under each method; a line has at most 200 of them.`;
    const place = "place, from the worst client to the best";

    const y = chosen("y"), x = chosen("x"), lines = curves(group, y, x), ofPhase = group.notes.mixed.includes(y);
    show(find("curves"), lines.traces, frame("curves", text(axes.x[x]) + (lines.unit && ", " + lines.unit), text(group.meanings[y]), {
      traces: lines.traces, said: sentences(group.notes.spread, ofPhase && group.notes.phases), xaxis: x === "round" ? whole(find("curves"), lines.rounds) : {},
    }));

    const [ids, markers] = clients(group), of = Math.max(...group.methods.map((m) => m.clients.of));
    show(find("clients"), markers, frame("clients", group.many ? place : "client", text(group.meanings.accuracy), {
      traces: markers, said: sentences(group.many && sorted(of), group.notes.phases),
      xaxis: group.many ? whole(find("clients"), [of]) : named(ids, fits(find("clients"), 30)),
    }));

    const known = recalls(group);
    if (known.length) show(find("classes"), known, frame("classes", "class", "recall, %", { traces: known, said: group.notes.phases, xaxis: classAxis(find("classes"), group) }));
    else say(find("classes"), "Not known: an earlier version made these runs, or they are of a real federation whose nodes do not tell their label histograms.");

    const found = group.gains[chosen("baseline")];
    if (Object.keys(found).length && group.many) {
      const traces = sortedGains(group, found);
      show(find("gains"), traces, frame("gains", place, "points gained", { traces, said: sentences(sorted(of), group.notes.phases), xaxis: whole(find("gains"), [of]), yaxis: { zeroline: true, zerolinecolor: "#888" } }));
    } else if (Object.keys(found).length) {
      const [traces, where] = gains(group, found, find("gains"));
      show(find("gains"), traces, frame("gains", "client", "", { said: group.notes.phases, ...where }));
    }

    const holders = group.histogram.clients, letters = 14;
    const rowsOf = (name, of, names, said) => frame(name, "class", of, { said, yaxis: down(names, letters), xaxis: classAxis(find(name), group) });
    if (!holders.length) say(find("data"), "Who holds what is known to the clients of this federation only.");
    else show(find("data"), heat(group.histogram.values, "samples", holders, group.classes, "client %{customdata[0]}, class %{customdata[1]}: %{z} samples", { top: group.histogram.top }), rowsOf("data", "client", holders, group.histogram.said));

    const method = group.methods[Number(chosen("method"))], portrait = method.portrait;
    const unknown = "This run has no portrait of its models: an earlier version made it, a mixture overflowed, or it is of a real federation, whose server does not know the true distributions.";
    const seen = portrait && norms(group, portrait, chosen("norms"));
    if (seen) {
      const scale = seen.diverging ? { diverging: true } : { top: largestNorm(portrait) }, unit = seen.diverging ? "change of the norm" : "norm of the output row";
      show(find("norms"), heat(seen.z, unit, seen.names, group.classes, seen.of + " %{customdata[0]}, class %{customdata[1]}: %{z:.4g}", scale), rowsOf("norms", seen.of, seen.names, seen.of === "client" ? portrait.said : ""));
    } else say(find("norms"), portrait ? "This method has no class models." : unknown);
    if (portrait) show(find("spread"), spread(method), frame("spread", "p, true share of a class", "p~, read from the weights", { said: portrait.dots.said }));
    else say(find("spread"), unknown);
    if (portrait && portrait.mixture.some((row) => row !== null)) {
      const z = portrait.mixture.map((row) => row || portrait.whose.map(() => null));
      const traces = heat(z, "share", portrait.clients, portrait.whose, "client %{customdata[0]} has of client %{customdata[1]}: %{z:.4g}");
      show(find("mixture"), traces, frame("mixture", "whose model (client)", "client", { said: portrait.said, yaxis: down(portrait.clients, letters), xaxis: named(portrait.whose, fits(find("mixture"), 40)) }));
    } else say(find("mixture"), portrait ? "No shares are known: the output layers are not made of the last round's uploads, or there were none, or too many." : unknown);

    const names = down(group.methods.map((m) => m.label), narrow() ? 16 : 28), height = 110 + 26 * group.methods.length;
    names.tickvals = group.methods.map((_, i) => i); names.ticktext = group.methods.map((m) => short(m.label, narrow() ? 16 : 28));
    const [size, unit] = bytes(Math.max(0, ...group.methods.map((m) => Object.values(m.traffic).reduce((a, b) => a + b, 0))));
    for (const [key, title, per, word] of [["traffic", `data sent, ${unit}`, size, unit], ["seconds", "seconds", 1, "s"]]) {
      const traces = bars(group, key, per, word);
      show(find(key), traces, frame(key, title, "", { barmode: "stack", traces, yaxis: names, height }));
    }
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

  // A table that is wider than the screen says so; phones hide scroll bars.
  const overflow = () => document.querySelectorAll(".scroll").forEach((box) => {
    box.classList.toggle("overflows", box.scrollWidth > box.clientWidth + 1);
  });

  document.querySelectorAll("table.sortable").forEach(sortable);
  const sections = [...document.querySelectorAll("section[data-group]")].map((section) => [section, groups[Number(section.dataset.group)]]);
  const redraw = () => sections.forEach(([section, group]) => draw(section, group));
  sections.forEach(([section, group]) => section.querySelectorAll("select").forEach((select) => select.addEventListener("change", () => draw(section, group))));
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", overflow));
  redraw();
  overflow();
  dark.addEventListener("change", redraw);
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); overflow(); } });
})();

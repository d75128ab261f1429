/* Cost: bytes and forward passes, and each method's metric at equal bytes, which `results/equal_bytes.py` ranks. */

page.views.push({
  id: "cost",
  name: "Cost",
  ready: (data) => data.cost.length > 0,
  async draw(root, data) {
    const metric = metricOf(data, data.metric);
    const label = (one) => data.methods[one.method].label;
    const talking = data.cost.filter((one) => one.bytes > 0);
    root.append(h("h2", {}, "Cost per client over the whole run"));
    const columns = [
      { name: "Method", text: true },
      { name: "n", show: (v) => show(v) },
      { name: "models received", show: (v) => show(v) },
      { name: "bytes received", show: (v) => (Number.isFinite(v) ? bytes(v) : "–") },
      { name: "bytes sent to a server", show: (v) => (Number.isFinite(v) ? bytes(v) : "–") },
      { name: "models missing", show: (v) => show(v) },
      { name: "samples trained on", show: (v) => show(v) },
      { name: "seconds per run", show: (v) => show(v) },
    ];
    const counted = Object.keys(data.cost[0].counted).filter((name) => data.cost.some((one) => one.counted[name]));
    columns.splice(6, 0, ...counted.map((name) => ({ name: metricOf(data, name).title, show: (v) => show(v, metricOf(data, name)) })));
    const number = (v) => (v === null ? NaN : v);
    root.append(h("div", { class: "scroll" }, sortable(columns, data.cost.map((one) => ({
      cells: [label(one), one.seeds, one.reads, one.received, one.sent, one.missing, ...counted.map((name) => number(one.counted[name])), number(one.train_samples), number(one.wall_s)],
    })), { label: "Cost per method" })));
    root.append(h("p", { class: "note" }, "Means over clients and n seeds. Bytes sent to peers are counted once, as the bytes that the peers receive; bytes sent to a server are counted separately. Forward passes are those of evaluating received models, in methods that compare peers by loss; “–” where a method has none."));
    if (!talking.length) return;

    root.append(h("h2", {}, `Validation ${metric.title} of the newest models, by bytes used`));
    chart(root, {
      height: 380,
      alt: `Validation ${metric.title} of the newest models against bytes per client, received and sent to a server`,
      caption: "Horizontal: cumulative bytes per client, received and sent to a server. A method without traffic is a dashed line at its final value.",
      option: () => ({
        xAxis: axis("bytes per client", { type: "value", min: 0, axisLabel: { color: css("--muted"), formatter: bytes }, splitLine: { show: false } }),
        yAxis: axis(`validation ${metric.title}`, { type: "value", scale: true, nameGap: 44,
          axisLabel: { color: css("--muted"), formatter: tick(metric) } }),
        tooltip: { ...tooltipStyle(), trigger: "item", formatter: (e) => (e.value ? `${escapeText(e.seriesName)}<br>${bytes(e.value[0])}: <b>${show(e.value[1], metric)}</b>` : "") },
        series: [...talking.flatMap((one) => banded(label(one), one.spent.map((s, i) => [s, one.reached[i] ?? NaN, NaN]), methodColor(one.method), methodDash(one.method), false)
          .map((series) => ({ ...series, showSymbol: true, symbol: markOf(one.method), symbolSize: 5 }))),
        ...data.cost.filter((one) => one.bytes === 0 && one.reached.length).map((one) => ({
          name: label(one), type: "line", data: [[0, one.reached.at(-1)], [Math.max(...talking.map((t) => t.bytes)), one.reached.at(-1)]], showSymbol: false,
          lineStyle: { color: methodColor(one.method), type: "dashed", width: 1.5 }, itemStyle: { color: methodColor(one.method) },
        }))],
      }),
    });
    const equal = data.equal_bytes;
    if (!equal.rows.length) return;
    const scored = metricOf(data, equal.metric);
    root.append(h("h2", {}, "At equal bytes"), h("p", {}, `${equal.heading[0].toUpperCase()}${equal.heading.slice(1)}, when a client has used ${bytes(equal.budget)}: ` +
      "what the communicating method that uses least has used in all."), h("div", { class: "scroll" }, sortable([
      { name: "Method", text: true }, { name: "n", show: (v) => show(v) }, { name: scored.heading, show: (v) => show(v, scored) },
      { name: "± over seeds", show: (v) => show(v, scored) }, { name: "rounds by then", show: (v) => show(v) }, { name: "bytes by then", show: bytes },
    ], equal.rows.map((one) => ({ cells: [one.label, one.seeds, one.value ?? NaN, one.std ?? NaN, one.rounds, one.used] })), { label: "At equal bytes" })),
    equal.caveat ? h("p", { class: "note" }, equal.caveat) : "");
  },
});

/* Every client: a strip plot, a table that sorts, and one client's own curve, peers and labels. */

page.views.push({
  id: "clients",
  name: "Clients",
  ready: (data) => data.cluster.length > 0,
  async draw(root, data) {
    const { final, gain } = data.clients;
    const [values, gains] = [(await unpack(final)).values, (await unpack(gain)).values];
    for (const curve of data.clients.curves) await unpack(curve.values);
    for (const one of data.reads ? data.reads.methods : []) { await unpack(one.peers); await unpack(one.times); }
    const ids = shownClients(data);
    const clients = ids.length;
    const metric = metricOf(data, data.metric);
    const state = kept("clients", { what: "final", client: null });
    const detail = h("div", { id: "client-detail", tabindex: "-1" });
    const of = (what, method, place) => (what === "final" ? values : gains)[method * clients + place];
    const methods = data.methods.map((m, i) => i).filter((m) => ids.some((_, place) => Number.isFinite(values[m * clients + place])));
    const baseline = data.clients.baseline;
    const planted = data.clusters.length > 0;
    const groups = listed(data);
    const rows = ids.map((client, place) => ({
      client, place,
      cells: [data.names ? clientName(data, client) : client, ...(data.names ? [client] : []), ...(planted ? [clusterName(data, data.cluster[client])] : []), ...methods.map((m) => of("final", m, place)),
        ...methods.filter((m) => data.methods[m].label !== baseline).map((m) => of("gain", m, place))],
    }));
    function pick(row, scroll = true) {
      state.client = row.place;
      for (const other of rows) other.element.setAttribute("aria-selected", String(other === row));
      drawClient(detail, data, row.client, row.place, clients);
      history.replaceState(null, "", `#client=${row.client}`);
      if (scroll) detail.scrollIntoView({ block: "nearest" });
    }

    root.append(h("h2", {}, `Test ${metric.title} of each client`), sampleNote(data) ?? "");
    if (!methods.length) {
      root.append(h("p", {}, "No run has finished its final evaluation yet."));
      return;
    }
    const strip = h("div");
    const options = [["final", `test ${metric.title}`]];
    if (baseline !== null) options.push(["gain", `gain over ${baseline}`]);
    root.append(h("div", { class: "controls" }, select("Show", options, (v) => { state.what = v; strip.drawn.draw(); }, state.what)), strip);
    const turned = () => Math.max(...shownMethods().map((m) => data.methods[m].label.length)) * 8 > room();
    const room = () => (strip.clientWidth - 90) / Math.max(1, shownMethods().length);
    const shownMethods = () => methods.filter((m) => state.what === "final" || data.methods[m].label !== baseline);
    strip.drawn = chart(strip, {
      height: 400,
      alt: `Strip plot of the test ${metric.title} of each client. ${methods.map((m) => {
        const own = ids.map((_, place) => of("final", m, place)).filter(Number.isFinite);
        return `${data.methods[m].label}: from ${show(Math.min(...own), metric)} to ${show(Math.max(...own), metric)}`;
      }).join("; ")}`,
      caption: `Each point is a client (mean over seeds), each bar the mean over clients${groups.length ? "; color and shape by planted cluster" : ""}. Click a point to see the client.`,
      click: (event) => { if (event.data && event.data.client !== undefined) pick(rows[event.data.place]); },
      option: () => ({
        xAxis: axis("", { type: "value", min: -0.5, max: shownMethods().length - 0.5, splitLine: { show: false }, axisTick: { show: false },
          axisLabel: { color: css("--text"), fontSize: 13, rotate: turned() ? 40 : 0, customValues: shownMethods().map((_, i) => i), formatter: (v) => data.methods[shownMethods()[Math.round(v)]].label },
          axisLine: { onZero: false, lineStyle: { color: css("--line") } } }),
        yAxis: axis(state.what === "final" ? `test ${metric.title}` : "gain", { type: "value", scale: true, nameGap: 44, axisLine: { show: false }, axisTick: { show: false },
          axisLabel: { color: css("--muted"), formatter: tick(metric) } }),
        tooltip: { ...tooltipStyle(), trigger: "item", formatter: (e) => (e.data.client === undefined ? "" :
          `${escapeText(withCluster(data, e.data.client))}<br><b>${show(e.data.value[1], metric, state.what === "gain")}</b>`) },
        grid: { ...base().grid, bottom: turned() ? 90 : 48 },
        series: [...(groups.length ? groups : [{ id: -1, name: "clients" }]).map((cluster) => ({
          name: cluster.name, type: "scatter", symbol: markOf(cluster.id), symbolSize: clients > 300 ? 5 : 8,
          itemStyle: { color: clusterColor(cluster.id), opacity: 0.95 }, cursor: "pointer",
          data: shownMethods().flatMap((m, column) => ids.flatMap((client, place) => (groups.length && data.cluster[client] !== cluster.id ? [] :
            [{ value: [column + spread(client), of(state.what, m, place)], client, place }]))),
        })), {
          type: "scatter", silent: true, symbol: "rect", symbolSize: [Math.min(70, 0.62 * room()), 3], itemStyle: { color: css("--text") }, z: 5, name: "mean",
          data: shownMethods().map((m, place) => [place, data.clients.means[state.what][m] ?? NaN]),
        }],
      }),
    });
    root.append(h("h2", {}, `Table: test ${metric.heading}`), h("div", { class: "tall" }, sortable([
      { name: "Client", text: Boolean(data.names) }, ...(data.names ? [{ name: "Id" }] : []), ...(planted ? [{ name: "Cluster", text: true }] : []),
      ...methods.map((m) => ({ name: data.methods[m].label, show: (v) => show(v, metric) })),
      ...methods.filter((m) => data.methods[m].label !== baseline).map((m) => ({ name: `${data.methods[m].label} − ${baseline ?? "Local"}`, show: (v) => show(v, metric, true) })),
    ].slice(0, rows[0].cells.length), rows, { onpick: pick, label: "Clients; choose a row to see the client" })), detail);
    page.picks.client = (asked) => {
      const row = rows.find((one) => String(one.client) === asked) ?? rows.find((one) => data.names?.[one.client] === asked);
      if (row) pick(row);
      return Boolean(row);
    };
    if (state.client !== null && rows[state.client]) pick(rows[state.client], false);
  },
});

/* A place between -0.28 and 0.28 that looks random and is the same every time (golden ratio). */
function spread(client) {
  return 0.56 * ((client * 0.618033988749895) % 1) - 0.28;
}

function drawClient(root, data, client, at, clients) {
  forget(root);
  const metric = metricOf(data, data.metric);
  root.replaceChildren(h("h2", { title: clientName(data, client) }, named(data, client) ? brief(clientName(data, client), 80) : `Client ${client}`), h("p", {}, [
    named(data, client) ? `client ${client}` : null,
    data.clusters.length ? clusterName(data, data.cluster[client]) : null,
    data.data?.shift?.[at] && data.data.shift[at] !== clusterName(data, data.cluster[client]) ? data.data.shift[at] : null,
    data.data?.train ? `${data.data.train[at]} training and ${data.data.validation[at]} validation samples` : null,
  ].filter(Boolean).join("; ")));
  const grid = h("div", { class: "grid" });
  root.append(grid);
  if (data.clients.curves.length) {
    const place = h("div", {}, h("h3", {}, `Its validation ${metric.title}`));
    grid.append(place);
    chart(place, {
      height: 300,
      alt: `Validation ${metric.title} of ${clientName(data, client)} over rounds`,
      option: () => ({
        xAxis: axis("round", { type: "value", min: "dataMin", max: "dataMax", minInterval: 1, splitLine: { show: false } }),
        yAxis: axis("", { type: "value", scale: true, axisLabel: { color: css("--muted"), formatter: tick(metric) } }),
        tooltip: { ...tooltipStyle(), trigger: "axis", formatter: axisTooltip(metric, "round") },
        series: data.clients.curves.flatMap((curve) => {
          const packed = page.unpacked.get(curve.values).values;
          const points = curve.rounds.map((r, i) => [r, packed[i * clients + at], NaN]);
          return banded(data.methods[curve.method].label, points, methodColor(curve.method), methodDash(curve.method), false);
        }),
      }),
    });
  }
  for (const one of data.reads ? data.reads.methods : []) {
    const { values: peers, shape } = page.unpacked.get(one.peers);
    const { values: times } = page.unpacked.get(one.times);
    const own = Array.from({ length: shape[1] }, (_, k) => [peers[at * shape[1] + k], times[at * shape[1] + k]]).filter(([, t]) => t);
    if (!own.length) continue;
    const name = data.methods[one.method].label;
    const place = h("div", {}, h("h3", {}, `Most used peers: ${name}`));
    grid.append(place);
    chart(place, {
      height: 300,
      alt: `${name}: ${clientName(data, client)} used the models of ${own.map(([p, t]) => `${clientName(data, p)} ${t} times`).join(", ")}`,
      option: () => ({
        grid: { left: 110, right: 24, top: 10, bottom: 40 },
        xAxis: axis("times used", { type: "value", minInterval: 1 }),
        yAxis: axis("", { type: "category", inverse: true, data: own.map(([p]) => briefClient(data, p, 16)), splitLine: { show: false } }),
        tooltip: { ...tooltipStyle(), trigger: "item", formatter: (e) => `${escapeText(withCluster(data, own[e.dataIndex][0]))}: ${e.value}` },
        series: [{ type: "bar", data: own.map(([p, t]) => ({ value: t, itemStyle: { color: clusterColor(data.cluster[p]) } })), barMaxWidth: 18 }],
      }),
    });
  }
  if (data.data?.labels) {
    const place = h("div", {}, h("h3", {}, "Labels of the training data"));
    grid.append(place);
    chart(place, {
      height: 300,
      alt: `Labels of ${clientName(data, client)}: ${data.data.labels[at].map((n, i) => `${data.data.classes[i]} ${n}`).join(", ")}`,
      option: () => ({
        grid: { left: 50, right: 10, top: 10, bottom: 50 },
        xAxis: axis("", { type: "category", data: data.data.classes, splitLine: { show: false } }),
        yAxis: axis("samples", { type: "value", minInterval: 1 }),
        tooltip: { ...tooltipStyle(), trigger: "axis" },
        series: [{ type: "bar", data: data.data.labels[at], itemStyle: { color: clusterColor(data.cluster[client]) } }],
      }),
    });
  }
}

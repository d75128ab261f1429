/* The collaboration graph: clients are vertices, lines go from each client to the peers it used most. */

page.views.push({
  id: "graph",
  name: "Graph",
  ready: (data) => data.reads !== null || data.labels.length > 0,
  async draw(root, data) {
    const methods = data.reads ? data.reads.methods : [];
    for (const one of methods) { await unpack(one.peers); await unpack(one.times); }
    for (const one of data.labels) await unpack(one.label);
    if (methods.length) drawGraph(root, data, methods);
    drawFound(root, data, methods);
  },
});

const GRAPH_CLIENTS = 500; // of a sample, whose lines are drawn

function drawGraph(root, data, methods) {
  const clients = data.cluster.length;
  const ids = shownClients(data);
  const few = ids.length < clients; // then lines go from every so many of the sample
  const step = few ? Math.ceil(ids.length / GRAPH_CLIENTS) : 1;
  const order = data.cluster.map((c, i) => [c, i]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, i]) => i);
  const angle = new Float64Array(clients);
  order.forEach((client, place) => { angle[client] = (2 * Math.PI * place) / clients; });
  const state = kept("graph", { method: 0, peers: Math.min(3, page.unpacked.get(methods[0].peers).shape[1]), color: listed(data).length ? "truth" : "communities", layout: "circle" });
  state.method = Math.min(state.method, methods.length - 1);
  const box = h("div");
  const label = (one) => data.methods[one.method].label;
  const who = (id) => escapeText(clientName(data, id));

  function groupsOf(one) {
    if (state.color === "truth") return data.cluster;
    const own = data.labels.find((l) => l.method === one.method);
    if (state.color === "found" && own) {
      const { values } = page.unpacked.get(own.label);
      return Array.from(values.slice(values.length - clients), (v) => (v === 65535 ? -1 : v));
    }
    return one.communities;
  }

  function links(one) {
    const { values: peers, shape } = page.unpacked.get(one.peers);
    const { values: times } = page.unpacked.get(one.times);
    const out = [];
    for (let i = 0; i < ids.length; i += step) {
      let total = 0;
      for (let k = 0; k < shape[1]; k += 1) total += times[i * shape[1] + k];
      for (let k = 0; k < Math.min(state.peers, shape[1]); k += 1) {
        const count = times[i * shape[1] + k];
        if (count) out.push({ from: ids[i], to: peers[i * shape[1] + k], count, share: count / total });
      }
    }
    return out;
  }

  function option() {
    const one = methods[state.method];
    const groups = groupsOf(one);
    const lines = links(one);
    const inDegree = new Float64Array(clients);
    lines.forEach((l) => { inDegree[l.to] += 1; });
    const drawnIds = few ? [...new Set(lines.flatMap((l) => [l.from, l.to]))] : ids;
    const radius = Math.max(5, Math.min(16, 520 / clients));
    const inside = lines.filter((l) => data.cluster[l.from] === data.cluster[l.to]).length;
    const text = `${label(one)}: ${few ? `${drawnIds.length} of ` : ""}${clients} clients, ${lines.length} lines to the ${state.peers} most used peers${data.clusters.length ? `, ${inside} of them within a planted cluster` : ""}`;
    box.firstChild?.querySelector("[role=img]")?.setAttribute("aria-label", text);
    return {
      tooltip: {
        ...tooltipStyle(),
        formatter: (e) => (e.dataType === "edge"
          ? `${who(e.data.source)} used the model of ${who(e.data.target)} ${e.data.count} times`
          : `${who(e.data.id)}${data.clusters.length ? `<br>${escapeText(clusterName(data, data.cluster[e.data.id]))}` : ""}<br>found group ${groupsOf(one)[e.data.id]}<br>a most used peer of ${inDegree[e.data.id]} clients`),
      },
      series: [{
        type: "graph", layout: state.layout === "circle" ? "none" : "force", roam: true, left: 40, right: 40, top: 30, bottom: 30,
        preserveAspect: true,
        force: { repulsion: 40, edgeLength: [20, 120], gravity: 0.12, layoutAnimation: false },
        edgeSymbol: ["none", clients <= 60 ? "arrow" : "none"], edgeSymbolSize: 6,
        data: drawnIds.map((i) => ({
          id: String(i), name: named(data, i) ? briefClient(data, i, 16) : String(i), x: Math.cos(angle[i]), y: Math.sin(angle[i]), symbol: markOf(groups[i]),
          symbolSize: radius * (0.8 + Math.min(1.2, inDegree[i] / (3 * state.peers))),
          itemStyle: { color: clusterColor(groups[i]), borderColor: css("--page"), borderWidth: 1 },
          label: { show: clients <= 40, color: css("--text"), fontSize: 11, position: "right" },
        })),
        links: lines.map((l) => ({
          source: String(l.from), target: String(l.to), count: l.count,
          lineStyle: { color: css("--muted"), opacity: Math.min(0.75, 0.12 + l.share), width: 0.6 + 2 * l.share, curveness: 0.12 },
        })),
        emphasis: { focus: "adjacency", lineStyle: { width: 3 } },
      }],
    };
  }

  let drawn = null;
  const redraw = () => { if (drawn) drawn.draw(); };
  const most = page.unpacked.get(methods[0].peers).shape[1];
  const colors = [...(listed(data).length ? [["truth", "planted cluster"]] : []), ["communities", "communities of reads"]];
  if (data.labels.length) colors.push(["found", "group found by the method"]);
  const layouts = [["circle", data.clusters.length ? "circle, by planted cluster" : "circle"]];
  if (clients <= 200) layouts.push(["force", "force-directed"]);
  const peers = h("input", { type: "range", min: 1, max: most, value: state.peers, "aria-label": "peers per client" });
  peers.addEventListener("input", () => { state.peers = Number(peers.value); redraw(); });
  root.append(h("h2", {}, "Collaboration graph"), h("div", { class: "controls" },
    select("Method", methods.map((one, i) => [i, label(one)]), (v) => { state.method = Number(v); redraw(); }, state.method),
    select("Color", colors, (v) => { state.color = v; redraw(); }, state.color),
    select("Layout", layouts, (v) => { state.layout = v; redraw(); }, state.layout),
    h("label", {}, "Peers per client", peers)), few ? h("p", { class: "note" },
    `Of ${clients} clients a sample of ${Math.ceil(ids.length / step)} is shown with the peers that they used most; the communities are those of all.`) : "", box);
  drawn = chart(box, {
    height: Math.min(620, Math.max(300, box.clientWidth)), alt: "", option,
    caption: `Each client and its most used peers over the whole run, all seeds together${clients <= 60 ? "; an arrow leads from a client to one whose model it used" : ""}. Size: how many clients use it; shape and color: group. Drag to move, scroll to zoom; or arrows, + and −, and 0 for the whole.`,
  });
  drawn.draw();
  if (listed(data).length) {
    root.append(h("p", { class: "muted" }, ...data.clusters.map((c) => h("span", { style: "margin-right:16px" },
      clusterGlyph(c.id), c.name))));
  }
}

/* A client's name, with its planted cluster where there are any. */
const withCluster = (data, id) => `${clientName(data, id)}${data.clusters.length ? ` (${clusterName(data, data.cluster[id])})` : ""}`;

function clusterName(data, id) {
  page.clusters ??= new WeakMap();
  if (!page.clusters.has(data)) page.clusters.set(data, new Map(data.clusters.map((c) => [c.id, c])));
  const cluster = page.clusters.get(data).get(id);
  return cluster ? cluster.name : "no planted cluster";
}

/* Found groups and planted clusters over rounds: labels of the method, or communities of its reads. */
function drawFound(root, data, methods) {
  if (data.clusters.length < 2) return;
  const lines = [
    ...methods.filter((one) => !data.labels.some((l) => l.method === one.method)).map((one) => ({
      method: one.method, points: one.windows.map((w) => [w.round, w.ari, NaN]), groups: one.windows.at(-1)?.groups, nmi: one.windows.at(-1)?.nmi,
    })),
    ...data.labels.map((one) => ({
      method: one.method, points: one.rounds.map((r, i) => [r, one.ari[i] ?? NaN, NaN]), groups: one.groups.at(-1), nmi: one.nmi.at(-1),
    })),
  ];
  const name = (line) => data.methods[line.method].label;
  root.append(h("h2", {}, "Found groups compared with the planted clusters"));
  chart(root, {
    height: 320,
    alt: `Adjusted Rand index over rounds; in the end: ${lines.map((l) => `${name(l)} ${show(l.points.at(-1)?.[1])} with ${show(l.groups)} groups`).join(", ")}`,
    caption: "Adjusted Rand index: 1 for the planted partition, 0 by chance. Groups are the clusters that the method found, or else the communities of reads in each window of rounds.",
    option: () => ({
      xAxis: axis("round", { type: "value", min: "dataMin", max: "dataMax", minInterval: 1, splitLine: { show: false } }),
      yAxis: axis("adjusted Rand index", { type: "value", max: 1, nameGap: 40 }),
      tooltip: { ...tooltipStyle(), trigger: "axis", formatter: axisTooltip(PLAIN, "round") },
      series: lines.flatMap((line) => banded(name(line), line.points, methodColor(line.method), methodDash(line.method), false)
        .map((series) => ({ ...series, showSymbol: line.points.length < 20, symbol: markOf(line.method), symbolSize: 7 }))),
    }),
  });
}

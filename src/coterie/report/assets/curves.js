/* Learning curves per method and planted cluster, with bands over seeds. */

/* An axis of shares does not go beyond 0 and 1 where only a band does. */
const SHARE = { min: ({ min }) => (min < 0 ? 0 : null), max: ({ max }) => (max > 1 ? 1 : null) };

function curveOption(data, curves, group, bands, zoom = false, by = "rounds") {
  const { split } = curves[0];
  const metric = metricOf(data, curves[0].metric);
  const [xname, interval] = by === "rounds" ? ["round", { minInterval: 1 }] : ["second", {}];
  return {
    xAxis: axis(xname, { type: "value", min: "dataMin", max: "dataMax", ...interval, splitLine: { show: false } }),
    yAxis: axis(titled(metric, split), { type: "value", scale: true, nameGap: 44, ...(metric.unit === "%" ? SHARE : {}),
      axisLabel: { color: css("--muted"), formatter: tick(metric) } }),
    tooltip: { ...tooltipStyle(), trigger: "axis", formatter: axisTooltip(metric, xname) },
    dataZoom: zoom ? [{ type: "inside", filterMode: "none" }] : [],
    series: curves.flatMap((curve) => {
      const [m, s] = [page.unpacked.get(curve.mean).values, page.unpacked.get(curve.std).values];
      const at = group * curve.rounds.length;
      const points = curve[by].map((x, i) => [x, m[at + i], s[at + i]]);
      return banded(data.methods[curve.method].label, points, methodColor(curve.method), methodDash(curve.method), bands);
    }),
  };
}

function curveSentence(data, curves, group, name = "all clients") {
  const { split } = curves[0];
  const metric = metricOf(data, curves[0].metric);
  const ends = curves.map((curve) => {
    const last = page.unpacked.get(curve.mean).values[(group + 1) * curve.rounds.length - 1];
    return `${data.methods[curve.method].label} ${show(last, metric)}`;
  });
  return `${titled(metric, split)} over rounds, ${name}; at the last round: ${ends.join(", ")}`;
}

/* Over how many seeds the curves are means: one number, or one for each method where they differ. */
function seedSentence(data, curves) {
  const counts = new Set(curves.map((c) => c.seeds));
  if (counts.size > 1) return `Lines are means over seeds: ${curves.map((c) => `${data.methods[c.method].label} n = ${c.seeds}`).join(", ")}.`;
  const [seeds] = counts;
  return seeds > 1 ? `Lines are means over n = ${seeds} seeds, bands one standard deviation over seeds.` : "One seed, so no bands.";
}

page.views.push({
  id: "curves",
  name: "Learning curves",
  ready: (data) => data.curves.length > 0,
  async draw(root, data) {
    const kinds = [...new Map(data.curves.map((c) => [`${c.split} ${c.metric}`, c])).values()];
    const groups = [[0, "all clients (mean)"]];
    if (data.clusters.length) groups.push([1, "clusters (mean, equal weight)"]);
    listed(data).forEach((cluster, i) => groups.push([2 + i, cluster.name]));
    // Rounds of methods that do not wait for each other differ in length.
    const timed = data.curves.every((curve) => curve.seconds);
    const state = kept("curves", { kind: 0, group: 0, bands: true, small: false, by: timed ? "seconds" : "rounds" });
    for (const curve of data.curves) { await unpack(curve.mean); await unpack(curve.std); }
    const box = h("div");

    const chosen = () => data.curves.filter((c) => c.split === kinds[state.kind].split && c.metric === kinds[state.kind].metric);

    function one(group, height, place) {
      chart(place, {
        height, alt: curveSentence(data, chosen(), group, groups[group][1]),
        option: () => curveOption(data, chosen(), group, state.bands, !state.small, state.by),
      });
    }

    function redraw() {
      forget(box);
      box.replaceChildren();
      if (!state.small) {
        one(state.group, 420, box);
      } else {
        const grid = h("div", { class: "grid" });
        box.append(grid);
        for (const [group, name] of groups) {
          const place = h("div", {}, h("h3", {}, name));
          grid.append(place);
          one(group, 270, place);
        }
      }
      const { split } = kinds[state.kind];
      box.append(h("p", { class: "note" }, `Models after each round on each client's own ${split} data; round −1 is the warm-up. ` +
        seedSentence(data, chosen()) +
        " Scroll on the chart to zoom, or press + and − on it (arrows move, 0 shows all); a name above it hides its line."));
    }

    root.append(h("h2", {}, "Learning curves"), h("div", { class: "controls" },
      select("What", kinds.map((c, i) => [i, titled(metricOf(data, c.metric), c.split)]), (v) => { state.kind = Number(v); redraw(); }, state.kind),
      select("Over", groups, (v) => { state.group = Number(v); redraw(); }, state.group),
      timed ? select("By", [["seconds", "time"], ["rounds", "rounds"]], (v) => { state.by = v; redraw(); }, state.by) : null,
      groups.length > 2 ? checkbox("one chart per cluster", state.small, (on) => { state.small = on; redraw(); }) : null,
      checkbox("bands", state.bands, (on) => { state.bands = on; redraw(); })), box);
    redraw();
  },
});

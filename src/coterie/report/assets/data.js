/* The data of the federation, and the provenance of the runs. */

page.views.push({
  id: "data",
  name: "Data",
  ready: (data) => Boolean(data.data?.labels),
  async draw(root, data) {
    const told = data.data;
    const apart = listed(data).length > 0;
    const groups = apart ? data.clusters : [{ id: -1, name: "all clients" }];
    root.append(h("h2", {}, "The data"), h("p", {}, `${told.name}; fingerprint ${told.fingerprint} (first seed).`));
    if (told.features?.length) {
      root.append(h("details", { id: "features", open: told.features.length <= 40 },
        h("summary", {}, `${told.features.length} numbers of an input`), h("p", { dir: "auto" }, told.features.join(", "))));
    }
    for (const cluster of groups) {
      const members = told.sums ? [] : data.cluster.map((c, i) => [c, i]).filter(([c]) => !apart || c === cluster.id).map(([, i]) => i).filter((i) => told.labels[i]);
      const number = told.sums ? told.sums[cluster.id]?.clients ?? 0 : members.length;
      if (!number) continue;
      const sum = told.sums ? told.sums[cluster.id].labels : told.classes.map((_, k) => members.reduce((total, i) => total + told.labels[i][k], 0));
      const samples = (told.images ?? [])[Math.max(0, cluster.id)] ?? [];
      const place = h("div");
      root.append(h("h3", {}, clusterGlyph(cluster.id), `${cluster.name} (${number} clients)`), place);
      if (samples.length) {
        place.append(h("div", { class: "samples" }, ...samples.map((src, i) => h("img", { src, alt: `sample ${i + 1} of ${cluster.name}` }))));
      }
      chart(place, {
        height: 200,
        alt: `Training labels of ${cluster.name}: ${told.classes.map((name, k) => `${name} ${sum[k]}`).join(", ")}`,
        option: () => ({
          grid: { left: 60, right: 20, top: 16, bottom: 40 },
          xAxis: axis("", { type: "category", data: told.classes, splitLine: { show: false } }),
          yAxis: axis("samples", { type: "value", minInterval: 1 }), tooltip: { ...tooltipStyle(), trigger: "axis" },
          series: [{ type: "bar", data: sum, itemStyle: { color: clusterColor(cluster.id) }, barMaxWidth: 40 }],
        }),
      });
    }
    root.append(h("p", { class: "note" }, "Training samples per label; the histogram of each client is under Clients."));
  },
});

page.views.push({
  id: "provenance",
  name: "Provenance",
  ready: () => true,
  async draw(root, data) {
    root.append(h("h2", {}, "Run it again"), h("pre", { id: "command" }, data.command ?? ""),
      h("p", { class: "note" }, "Run this in the parent of the study's folder. config.toml is fully resolved: it holds every setting."));
    if (data.study_config) root.append(h("details", {}, h("summary", {}, "config.toml"), h("pre", {}, data.study_config)));
    const environment = (stored) => {
      const hardware = stored.hardware ?? {};
      return [Object.entries(stored.packages ?? {}).map(([k, v]) => `${k} ${v}`).join(", "), stored.python ? `Python ${stored.python}` : null,
        [stored.device, hardware.machine, hardware.system, hardware.cores ? `${hardware.cores} cores` : null, stored.engine?.name ? `engine ${stored.engine.name}` : null].filter(Boolean).join(", "),
      ].filter(Boolean).join("; ") || "not recorded";
    };
    const kinds = [...new Set(data.provenance.map(({ stored }) => environment(stored)))];
    root.append(h("h2", {}, "Runs"), h("div", { class: "tall" }, sortable([
      { name: "Method", text: true }, { name: "Seed" }, { name: "Rounds" }, { name: "Finished", text: true },
      { name: "Settings' hash", text: true }, { name: "Commit", text: true }, { name: "Environment" },
    ], data.provenance.map(({ label, seed, stored }) => {
      const run = data.methods.find((m) => m.label === label).runs.find((r) => r.seed === seed);
      return { cells: [label, seed, run.rounds, run.finished ? "yes" : "no", String(stored.config_hash ?? "–"), String(stored.commit ?? "–").slice(0, 12), kinds.indexOf(environment(stored)) + 1] };
    }), { label: "Runs" })), h("p", {}, kinds.map((kind, i) => `Environment ${i + 1}: ${kind}.`).join(" ")));
    root.append(h("h2", {}, "Methods"), ...data.methods.map((m) => h("details", {}, h("summary", {}, `${m.label} (${m.kind})`),
      h("pre", {}, Object.entries(m.settings).map(([k, v]) => `${k} = ${JSON.stringify(v)}`).join("\n")))));
  },
});

/* Tabs, theme and start. */

const drawnViews = new Set();

/* Under the tables of the first view: the main learning curve, and the models that each client used over the whole run. */
const glance = {
  async draw(root, data) {
    const place = root.querySelector("#glance");
    if (!place || !data.methods.length) return;
    const chosen = data.curves.filter((c) => c.split === "validation" && c.metric === data.metric);
    const grid = h("div", { class: "grid" });
    place.append(grid);
    if (chosen.length) {
      for (const curve of chosen) { await unpack(curve.mean); await unpack(curve.std); }
      const box = h("div", {}, h("h3", {}, `Validation ${metricOf(data, data.metric).title}, mean over clients`));
      grid.append(box);
      chart(box, {
        height: 330, alt: curveSentence(data, chosen, 0), caption: `${seedSentence(data, chosen)} More under Learning curves.`,
        option: () => curveOption(data, chosen, 0, true),
      });
    }
    if (data.reads) {
      const one = data.reads.methods.find((m) => data.methods[m.method].kind !== "random" && data.methods[m.method].kind !== "oracle") ?? data.reads.methods[0];
      await unpack(one.counts);
      const map = heatmapOf(data, data.reads, `Which models each client used: ${data.methods[one.method].label}`);
      grid.append(map.element);
      const draw = () => drawWhole(map, data, one);
      page.redraw.set(map.element, draw);
      draw();
    }
  },
};

function panelOf(id) {
  return document.getElementById(`view-${id}`);
}

async function open(id, focus = false) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${id}`;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  for (const view of document.querySelectorAll(".view")) view.hidden = view.id !== `view-${id}`;
  history.replaceState(null, "", `#${id}`);
  const view = id === "overview" ? glance : page.views.find((v) => v.id === id);
  if (view && !drawnViews.has(id)) {
    drawnViews.add(id);
    await view.draw(panelOf(id), page.data);
  }
  document.body.dataset.open = id;
}

/* Open what an address names after its #: a view, or client=7, client=Oslo, method=DAC, pair=DAC,Random. */
async function go(ids) {
  const asked = location.hash.slice(1);
  const [, kind, text] = /^(client|method|pair)=(.*)$/.exec(asked) ?? [];
  const words = (text ?? "").split(",").map((word) => { try { return decodeURIComponent(word); } catch { return word; } });
  const view = { client: "clients", method: "pairs", pair: "pairs" }[kind] ?? asked;
  await open(ids.includes(view) ? view : "overview");
  if (kind && page.picks[kind]?.(...words)) history.replaceState(null, "", `#${asked}`);
}

function build() {
  const tabs = document.getElementById("tabs");
  const shown = page.views.filter((view) => page.data.methods.length && view.ready(page.data));
  const all = [{ id: "overview", name: "Overview" }, ...shown];
  tabs.replaceChildren(...all.map((view) => h("button", {
    type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": `view-${view.id}`, onclick: () => open(view.id),
  }, view.name)));
  for (const view of shown) {
    if (!panelOf(view.id)) {
      document.getElementById("panel").append(h("section", {
        id: `view-${view.id}`, class: "view", role: "tabpanel", "aria-labelledby": `tab-${view.id}`, hidden: true,
      }));
    }
  }
  tabs.onkeydown = (event) => {
    const list = [...tabs.children];
    const at = list.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: list.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    open(list[(to + list.length) % list.length].id.slice(4), true);
  };
  return all.map((view) => view.id);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  CLUSTER_COLORS.forEach((_, i) => document.documentElement.style.setProperty(`--cluster-${i}`, clusterColor(i)));
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  document.getElementById("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colors`);
  for (const { draw } of page.charts.values()) draw();
  for (const redraw of page.redraw.values()) redraw();
}

/* ---- following a run: the page that `coterie watch` serves asks for newer data and draws the open view again ------ */

async function renew(message) {
  page.data = message.data;
  document.querySelector(".subtitle").textContent = message.subtitle;
  const overview = panelOf("overview");
  forget(overview);
  overview.innerHTML = message.overview; // written and escaped by the server
  const ids = build();
  for (const id of drawnViews) {
    forget(panelOf(id));
    if (id !== "overview") panelOf(id).replaceChildren();
  }
  drawnViews.clear();
  const now = document.body.dataset.open;
  const top = scrollY;
  delete document.body.dataset.open; // set again when the view is drawn
  await open(ids.includes(now) ? now : "overview");
  scrollTo(0, top);
}

async function follow() {
  const status = document.getElementById("live");
  const token = new URLSearchParams(location.search).get("token");
  let signature = page.data.signature;
  for (;;) {
    await new Promise((wake) => setTimeout(wake, 2000));
    try {
      const answer = await fetch(`data?token=${encodeURIComponent(token)}&since=${encodeURIComponent(signature)}`);
      if (answer.status === 200) {
        const message = await answer.json();
        signature = message.signature;
        await renew(message);
      } else if (answer.status !== 204) {
        throw new Error(answer.statusText);
      }
      const over = page.data.methods.length && page.data.methods.every((m) => m.runs.every((r) => r.finished));
      status.textContent = over ? "live: all runs have finished" : "live";
      document.body.dataset.signature = signature;
    } catch (error) {
      status.textContent = "connection lost; retrying";
    }
  }
}

async function start() {
  page.data = JSON.parse(document.getElementById("data").textContent);
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  const ids = build();
  await go(ids);
  addEventListener("hashchange", () => go([...document.querySelectorAll("[role=tab]")].map((tab) => tab.id.slice(4))));
  document.body.dataset.ready = "true";
  performance.mark("ready");
  if (page.data.signature !== undefined) follow();
}

start();

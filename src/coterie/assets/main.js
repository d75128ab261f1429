/* Tabs, theme and start. */

const drawnViews = new Set();

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
  const view = page.views.find((v) => v.id === id);
  if (view && !drawnViews.has(id)) {
    drawnViews.add(id);
    await view.draw(panelOf(id), page.data);
  }
  document.body.dataset.open = id;
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
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  document.getElementById("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  for (const { draw } of page.charts.values()) draw();
  for (const redraw of page.redraw) redraw();
}

async function start() {
  page.data = JSON.parse(document.getElementById("data").textContent);
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  const ids = build();
  const asked = location.hash.slice(1);
  await open(ids.includes(asked) ? asked : "overview");
  document.body.dataset.ready = "true";
}

start();

"use strict";
/* The page of a federation: what is new replaces what is shown, unless somebody is about to press a button. */
async function followFederation() {
  const shown = document.getElementById("content"), status = document.getElementById("live");
  const token = new URLSearchParams(location.search).get("token");
  for (;;) {
    await new Promise((wake) => setTimeout(wake, 2000));
    try {
      const since = encodeURIComponent(shown.dataset.signature);
      const answer = await fetch(`news?token=${encodeURIComponent(token)}&since=${since}`);
      if (answer.status === 200) {
        const news = await answer.json();
        const focused = shown.contains(document.activeElement) ? document.activeElement.id : "";
        shown.innerHTML = news.content;
        shown.dataset.signature = news.signature;
        if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
      } else if (answer.status !== 204) {
        throw new Error(answer.statusText);
      }
      status.textContent = "live";
    } catch (error) {
      status.textContent = "connection lost; retrying";
    }
  }
}
if (document.getElementById("content").dataset.signature) followFederation();

// Draws the plots of the page in the colours of its theme, and draws them again when theme, rank or scale changes.
(() => {
  "use strict";
  const root = document.documentElement;
  const page = JSON.parse(document.getElementById("figures").textContent);
  const wishes = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 760px)");
  const coarse = window.matchMedia("(pointer: coarse)");
  const hovers = window.matchMedia("(hover: hover)");
  const logs = {};
  let rank = page.rank;
  let chosen = null;

  const figureOf = (id) => page.common[id] || (page.ranks[rank] || {})[id];
  const isLog = (id, figure) => (id in logs ? logs[id] : Boolean(figure.log));

  // Only where plotly expects a colour: a name from a file that begins with @ stays what it is.
  const colourKeys = new Set(["color", "fillcolor", "bgcolor", "bordercolor", "gridcolor"]);
  const paint = (value, key, style) => {
    if (typeof value === "string") {
      return colourKeys.has(key) && value[0] === "@" ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((one) => paint(one, key, style));
    if (value && typeof value === "object") {
      const out = {};
      for (const name of Object.keys(value)) out[name] = paint(value[name], name, style);
      return out;
    }
    return value;
  };

  const axis = (given, style) => {
    const soft = style.getPropertyValue("--soft").trim();
    const grid = style.getPropertyValue("--grid").trim();
    const plain = { gridcolor: grid, linecolor: grid, zeroline: false, tickfont: { color: soft, size: 11 } };
    const title = { ...(given.title || {}), font: { color: soft, size: 12 }, standoff: 8 };
    return { ...plain, ...given, title };
  };

  // Room for a legend of as many rows as it will need, so that it covers no axis and leaves no gap.
  // Entries that do not fit into one row stand in columns as wide as the widest of them.
  const legendRows = (traces, width) => {
    const widths = traces.map((trace) => 50 + 7 * String(trace.name || "").length);
    const room = width - 70;
    if (widths.reduce((sum, one) => sum + one, 0) <= room) return 1;
    return Math.ceil(widths.length / Math.max(1, Math.floor(room / Math.max(...widths))));
  };

  const draw = (slot) => {
    const id = slot.dataset.plot;
    const figure = figureOf(id);
    slot.closest("figure").hidden = !figure;
    if (!figure) return undefined;
    const style = getComputedStyle(root);
    const ink = style.getPropertyValue("--ink").trim();
    const layout = paint(figure.layout, "", style);
    layout.xaxis = axis(layout.xaxis, style);
    layout.yaxis = axis(layout.yaxis, style);
    if (isLog(id, figure)) {
      // Over several decades plotly would crowd the axis with every digit.
      layout.yaxis = { ...layout.yaxis, type: "log", rangemode: "normal", ...(figure.log ? { dtick: "D2" } : {}) };
    }
    layout.paper_bgcolor = "rgba(0,0,0,0)";
    layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 };
    layout.hoverlabel = { bgcolor: style.getPropertyValue("--card").trim(), font: { color: ink } };
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--soft").trim(), activecolor: ink };
    layout.dragmode = coarse.matches ? false : "zoom"; // a finger scrolls the page
    layout.height = layout.height || (narrow.matches ? 260 : slot.closest(".wide") ? 340 : 280);
    if (layout.showlegend) {
      const room = 6 + 20 * legendRows(figure.data, slot.clientWidth);
      layout.margin.b += room;
      layout.height += narrow.matches ? room : 0;
    }
    slot.setAttribute("aria-label", figure.alt);
    const caption = slot.closest("figure").querySelector("figcaption");
    if (caption && caption.dataset.alt !== undefined) caption.textContent = figure.alt;
    const button = slot.closest("figure").querySelector("button[data-log]");
    if (button) button.setAttribute("aria-pressed", String(isLog(id, figure)));
    const settings = { responsive: true, displaylogo: false, displayModeBar: hovers.matches ? "hover" : false };
    settings.modeBarButtonsToRemove = ["select2d", "lasso2d", "autoScale2d"];
    settings.showSendToCloud = false; // a run's numbers stay on this machine
    return Plotly.react(slot, paint(figure.data, "", style), layout, settings);
  };

  const slots = [...document.querySelectorAll("[data-plot]")];
  const drawAll = () => Promise.all(slots.map(draw));

  const show = (theme) => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to " + (theme === "dark" ? "light" : "dark") + " colours");
  };
  const wished = () => chosen || (wishes.matches ? "dark" : "light");

  document.getElementById("theme").addEventListener("click", () => {
    chosen = wished() === "dark" ? "light" : "dark";
    show(chosen);
    drawAll();
  });
  wishes.addEventListener("change", () => {
    show(wished());
    drawAll();
  });
  narrow.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    show("light");
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    show(wished());
    drawAll();
  });
  for (const button of document.querySelectorAll("button[data-log]")) {
    button.addEventListener("click", () => {
      const id = button.dataset.log;
      logs[id] = !isLog(id, figureOf(id));
      draw(slots.find((slot) => slot.dataset.plot === id));
    });
  }
  const choice = document.getElementById("rank");
  if (choice) {
    choice.value = rank;
    choice.addEventListener("change", () => {
      rank = choice.value;
      drawAll();
    });
  }

  show(wished());
  // One after the other, so that the verdict can be read and scrolled while the plots come.
  let next = 0;
  const step = () => {
    if (next >= slots.length) {
      root.dataset.drawn = "all";
      return;
    }
    const slot = slots[next++];
    new Promise((resolve) => resolve(draw(slot)))
      .catch((error) => {
        console.error(error);
        slot.textContent = "This plot could not be drawn: " + error;
      })
      .then(() => setTimeout(step, 0));
  };
  step();
})();

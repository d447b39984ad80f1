"use strict";
const choice = document.getElementById("algorithm");
const known = document.getElementById("known");

function filter() {
  for (const body of document.querySelectorAll("main tbody")) {
    for (const row of body.rows) {
      const other = choice.value && row.dataset.algorithm && row.dataset.algorithm !== choice.value;
      row.hidden = other || (known.checked && row.classList.contains("absent"));
    }
    body.closest("section").querySelector(".nothing").hidden = [...body.rows].some((row) => !row.hidden);
  }
}

function sort(head) {
  const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const key = (row) => row.cells[head.cellIndex].dataset.sort ?? row.cells[head.cellIndex].textContent;
  const compare = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const numeric = head.classList.contains("number");
  const order = (a, b) => {
    const [left, right] = [key(a), key(b)];
    if (left === "" || right === "") return (left === "") - (right === "");
    return direction * (numeric ? left - right : compare(left, right));
  };
  body.append(...[...body.rows].sort(order));
}

function reveal() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const section = target.closest("section");
  if (section) section.firstElementChild.open = true;
  target.hidden = false;
  target.scrollIntoView();
}

// The grid: a tip with a square's numbers, and arrow keys; Tab stops once in each table.
const tip = document.getElementById("tip");

function show(link) {
  tip.replaceChildren(...link.getAttribute("aria-label").split("; ").map((text) => {
    const line = document.createElement("p");
    line.textContent = text;
    return line;
  }));
  tip.hidden = false;
  const [place, width] = [link.getBoundingClientRect(), document.documentElement.clientWidth];
  tip.style.left = `${Math.max(8, Math.min(place.left, width - tip.offsetWidth - 8))}px`;
  const above = place.top > tip.offsetHeight + 12;
  tip.style.top = `${window.scrollY + (above ? place.top - tip.offsetHeight - 6 : place.bottom + 6)}px`;
}

function neighbour(link, key) {
  const [cell, table] = [link.parentNode, link.closest("table")];
  const links = [...table.querySelectorAll("a")];
  if (key === "ArrowLeft" || key === "ArrowRight") return links[links.indexOf(link) + (key === "ArrowLeft" ? -1 : 1)];
  const column = links.filter((other) => other.parentNode.cellIndex === cell.cellIndex);
  if (key === "ArrowUp" || key === "ArrowDown") return column[column.indexOf(link) + (key === "ArrowUp" ? -1 : 1)];
}

for (const table of document.querySelectorAll(".grid")) {
  const links = [...table.querySelectorAll("a")];
  const stop = (link) => links.forEach((other) => { other.tabIndex = other === link ? 0 : -1; });
  stop(links[0]);
  table.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hidden = true;
    const next = event.target.closest("a") && neighbour(event.target, event.key);
    if (next) {
      event.preventDefault();
      next.focus();
    }
  });
  for (const link of links) {
    link.addEventListener("mouseenter", () => show(link));
    link.addEventListener("mouseleave", () => { tip.hidden = true; });
    link.addEventListener("focus", () => { stop(link); show(link); });
    link.addEventListener("blur", () => { tip.hidden = true; });
  }
}

for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button.parentNode));
choice.addEventListener("change", filter);
known.addEventListener("change", filter);
window.addEventListener("hashchange", reveal);
filter();
reveal();

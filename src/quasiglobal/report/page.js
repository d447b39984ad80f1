"use strict";
const choice = document.getElementById("algorithm");
const known = document.getElementById("known");

function filter() {
  for (const body of document.querySelectorAll("tbody")) {
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
  target.scrollIntoView();
}

for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sort(button.parentNode));
choice.addEventListener("change", filter);
known.addEventListener("change", filter);
window.addEventListener("hashchange", reveal);
filter();
reveal();

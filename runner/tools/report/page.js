"use strict";
// One chart is shown at a time; a row of a table that is clicked makes its curve stand out, another click undoes that.
(function () {
  var figures = Array.from(document.querySelectorAll("figure[data-metric]"));
  var picker = document.getElementById("metric");
  function show(metric) {
    figures.forEach(function (figure) { figure.hidden = figure.dataset.metric !== metric; });
  }
  if (picker && figures.length) {
    picker.hidden = false;
    picker.addEventListener("change", function () { show(picker.value); });
    show(picker.value);
  }
  var rows = Array.from(document.querySelectorAll("tr[data-key]"));
  function choose(key) {
    rows.forEach(function (row) { row.classList.toggle("chosen", row.dataset.key === key); });
    document.body.classList.toggle("some", key !== null);
    document.querySelectorAll(".curve").forEach(function (curve) {
      curve.classList.toggle("chosen", curve.dataset.key === key);
    });
  }
  rows.forEach(function (row) {
    row.addEventListener("click", function () {
      choose(row.classList.contains("chosen") ? null : row.dataset.key);
    });
  });
})();

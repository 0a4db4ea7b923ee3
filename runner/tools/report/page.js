"use strict";
// A row of a table that is clicked makes its curve stand out, another click undoes that.
(function () {
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

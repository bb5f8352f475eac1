"use strict";
// What is live on the dashboard's pages: a run's events, its log page by page, and actions. Texts of strangers are set
// as text, never as markup.
(function () {
  var MAX_LINES = 3000;

  function byId(name) { return document.getElementById(name); }

  function element(kind, text, attributes) {
    var made = document.createElement(kind);
    if (text !== undefined && text !== null) made.textContent = text;
    Object.keys(attributes || {}).forEach(function (key) { made.setAttribute(key, attributes[key]); });
    return made;
  }

  function known(value) { return value === null || value === undefined || value === "" ? "–" : String(value); }

  // Why a request failed; a TypeError is fetch's own, if nobody answers.
  function explain(error) {
    return error instanceof TypeError ? "The dashboard is not responding; this page may be out of date." : error.message;
  }

  function act(method, target, body) {
    return fetch(target, {
      method: method, credentials: "same-origin",
      headers: { "X-Mlbench-Action": "1", "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body)
    }).then(function (answer) {
      return answer.json().catch(function () { return {}; }).then(function (document) {
        if (!answer.ok) throw new Error((document.message || "Error " + answer.status) + (document.hint ? " Next: " + document.hint : ""));
        return document;
      });
    });
  }

  // Of buttons that come with a part of the page later, too.
  function actions() {
    document.addEventListener("click", function (event) {
      var button = event.target.closest("button[data-action]");
      if (!button || !window.confirm(button.dataset.question)) return;
      var status = document.querySelector(".status");
      button.disabled = true;
      if (status) { status.classList.remove("bad"); status.textContent = "…"; }
      act(button.dataset.action, button.dataset.target).then(function () {
        if (button.dataset.next) location.assign(button.dataset.next); else location.reload();
      }, function (error) {
        button.disabled = false;
        if (status) { status.classList.add("bad"); status.textContent = explain(error); }
      });
    });
  }

  // --- the form of a run -------------------------------------------------------------------------------------------

  // Which questions are asked depends on the answers before them, as on a terminal; the server checks all of them.
  function form() {
    var questions = byId("new");
    if (!questions) return;
    var known = JSON.parse(byId("choices").textContent), fields = questions.elements, answers = known.answers;
    var status = questions.querySelector(".status"), same = byId("same"), CUSTOM = "custom";

    function row(name, isAsked, isRequired) {
      questions.querySelector("[data-row=" + name + "]").hidden = !isAsked;
      fields[name].disabled = !isAsked;
      if (fields[name].type === "text") fields[name].required = isAsked && isRequired !== false;
    }
    function find(list, name) { return list.filter(function (item) { return item.name === name; })[0]; }
    function fill(select, names, preferred) {
      var chosen = [select.value, preferred].filter(function (name) { return names.indexOf(name) >= 0; })[0] || names[0];
      select.replaceChildren();
      names.forEach(function (name) { select.appendChild(element("option", name)); });
      if (chosen) select.value = chosen;
    }
    function gpuType() { return fields.gpu_type.disabled ? "" : fields.gpu_type.value.trim(); }
    function choose() {
      var task = find(known.tasks, fields.task.value), cluster = find(known.clusters, fields.cluster.value) || {};
      row("image", !task && !cluster.is_local);
      row("command", !task);
      row("preset", Boolean(task));
      row("light", Boolean(task));
      if (task) fill(fields.preset, task.presets.map(function (item) { return item.name; }), task.name === answers.task ? answers.preset : "spec");
      var preset = task && find(task.presets, fields.preset.value), lack = preset && cluster.is_local ? preset.lack : "";
      byId("preset-note").textContent = preset ? preset.note + (lack ? " – " + lack + (task.data ? " (--data-dir DIR): " + task.data : "") : "") : "";
      row("gpu_type", "paid" in fields.cluster.selectedOptions[0].dataset, false);
      row("device", (cluster.has_gpus || gpuType()) && (!task || task.has_gpu));
      var gpu = !fields.device.disabled && fields.device.value === "gpu";
      var backends = (task ? task.backends : known.own_backends).filter(function (name) { return name !== "nccl" || gpu; });
      fill(fields.backend, backends.concat([CUSTOM]), gpu ? "nccl" : answers.backend);
      row("custom_backend", fields.backend.value === CUSTOM);
      same.hidden = true;
    }
    function read() {
      var wanted = { name: fields.name.value, workers: fields.workers.value.split(/[ ,]+/).filter(Boolean).map(Number) };
      if (find(known.clusters, fields.cluster.value)) wanted.cluster = fields.cluster.value;
      else wanted.create = { provider: fields.cluster.value.replace("new ", "") };
      if (wanted.create && gpuType()) wanted.create.gpu_type = gpuType();
      ["task", "image", "command", "preset", "options"].forEach(function (name) {
        if (!fields[name].disabled && fields[name].value.trim()) wanted[name] = fields[name].value.trim();
      });
      if (fields.custom_backend.disabled) wanted.backend = fields.backend.value;
      else wanted.custom_backend = fields.custom_backend.value;
      if (!fields.device.disabled) wanted.gpu = fields.device.value === "gpu";
      if (fields.num_cpus.value) wanted.num_cpus = Number(fields.num_cpus.value);
      if (fields.light.checked && !fields.light.disabled) wanted.light = true;
      return wanted;
    }
    function send(target, text, done) {
      if (!questions.reportValidity()) return;
      status.classList.remove("bad");
      status.textContent = text;
      same.hidden = true;
      act("POST", target, read()).then(done, function (error) {
        status.classList.add("bad");
        status.textContent = explain(error);
        status.focus();
      });
    }
    // The command follows the form as long as its answers make sense; what is wrong is said when somebody asks.
    var timer = null;
    function preview() {
      clearTimeout(timer);
      timer = setTimeout(function () {
        if (!questions.checkValidity()) { same.hidden = true; return; }
        act("POST", "/api/v1/runs?check=try", read()).then(function (plan) {
          same.querySelector("code").textContent = plan.command || "";
          same.hidden = !plan.command;
        }, function () { same.hidden = true; });
      }, 400);
    }
    questions.addEventListener("change", function () { choose(); preview(); });
    choose();
    preview();
    byId("check").addEventListener("click", function () {
      send("/api/v1/runs?check=true", "Checking …", function (plan) {
        var words = plan.runs.length ? "This starts " + plan.runs.join(", ") + "." :
          "Run this command in a terminal: it shows the plan and its price, creates the cluster, and deletes it in the end.";
        status.textContent = words;
        same.querySelector("code").textContent = plan.command;
        same.hidden = false;
      });
    });
    questions.addEventListener("submit", function (event) {
      event.preventDefault();
      send("/api/v1/runs", "Starting …", function (started) {
        var one = started.runs.length === 1;
        location.assign(one ? "/runs/" + encodeURIComponent(started.runs[0]) : "/experiments/" + encodeURIComponent(started.experiment));
      });
    });
  }

  // --- a run's log ---------------------------------------------------------------------------------------------------

  function log(run) {
    var box = byId("log"), place = byId("log-place"), rank = byId("log-rank"), page = null, follows = true;
    function show(document) {
      page = document;
      box.textContent = document.lines.join("\n") + (document.lines.length ? "\n" : "");
      var last = document.end >= document.size;
      place.textContent = document.size ? "bytes " + document.offset.toLocaleString("en") + " to " + document.end.toLocaleString("en") +
        " of " + document.size.toLocaleString("en") + (last ? ", the end" : "") : "empty";
      follows = last;
      if (last) box.scrollTop = box.scrollHeight;
    }
    function load(offset) {
      fetch("/api/v1/runs/" + encodeURIComponent(run) + "/logs?rank=" + encodeURIComponent(rank.value) + "&offset=" + offset)
        .then(function (answer) { return answer.json(); })
        .then(function (document) { if (document.lines) show(document); else place.textContent = document.message; })
        .catch(function (error) { place.textContent = explain(error); });
    }
    byId("log-first").addEventListener("click", function () { load(0); });
    byId("log-last").addEventListener("click", function () { load(-1); });
    byId("log-before").addEventListener("click", function () { load(page && page.before !== null ? page.before : 0); });
    byId("log-after").addEventListener("click", function () { load(page ? page.end : 0); });
    rank.addEventListener("change", function () { load(-1); });
    load(-1);
    return function (lines, left) {
      if (!follows) return;
      var own = lines.filter(function (line) { return String(line.rank) === rank.value; });
      if (!own.length) return;
      var atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
      var kept = (box.textContent + own.map(function (line) { return line.text + "\n"; }).join("")).split("\n");
      box.textContent = kept.slice(-MAX_LINES).join("\n");
      if (atEnd) box.scrollTop = box.scrollHeight;
    };
  }

  // --- a run that is under way ------------------------------------------------------------------------------------------

  // Figures as the server draws them; rendered and escaped there.
  function showCurves(html) {
    var made = new DOMParser().parseFromString(html, "text/html").body;
    byId("curves").replaceChildren.apply(byId("curves"), Array.from(made.childNodes));
  }

  function showStatus(status) {
    byId("state").textContent = String(status.state).replace(/_/g, " ");
    byId("state").parentNode.className = status.state === "running" ? "badge live" : "badge";
    var words = status.words, bar = byId("bar");
    if (byId("progress")) byId("progress").textContent = words.progress;
    if (byId("eta")) byId("eta").textContent = words.eta;
    if (bar && words.share !== null) bar.value = words.share;
    var ranks = byId("ranks");
    (status.ranks || []).forEach(function (worker, index) {
      var row = ranks.rows[index];
      if (!row) {
        row = ranks.insertRow();
        row.appendChild(element("th", worker.rank, { scope: "row", "class": "number" }));
        for (var cell = 0; cell < 7; cell++) row.insertCell();
      }
      row.cells[1].textContent = worker.phase;
      row.cells[2].textContent = known(worker.exit_code);
      row.cells[3].textContent = known(worker.node);
      row.cells[4].textContent = worker.reason || "";
    });
    var list = byId("finding-list");
    list.replaceChildren();
    (status.findings || []).forEach(function (finding) {
      var item = list.appendChild(element("div", null, { "class": "note warn" })).appendChild(element("p"));
      item.appendChild(element("strong", finding.summary));
      if (finding.hint) item.appendChild(document.createTextNode(" Next: " + finding.hint));
    });
    byId("findings").hidden = !list.children.length;
    var metrics = byId("metrics");
    metrics.replaceChildren();
    byId("values").hidden = !Object.keys(words.metrics).length;
    Object.keys(words.metrics).forEach(function (name) {
      var row = metrics.insertRow();
      row.appendChild(element("th", name, { scope: "row" }));
      row.appendChild(element("td", words.metrics[name], { "class": "number" }));
    });
  }

  function showResources(used) {
    var rows = byId("ranks").rows;
    Object.keys(used).forEach(function (rank) {
      var row = rows[Number(rank)], facts = used[rank];
      if (!row || row.cells[0].textContent !== rank) return;
      [facts.cpu, facts.memory, facts.traffic].forEach(function (value, index) {
        row.cells[5 + index].textContent = value === null || value === undefined ? "–" : Number(value).toFixed(index === 1 ? 0 : 1);
      });
    });
  }

  function follow(root) {
    var addLines = log(root.dataset.name);
    if (root.dataset.live !== "yes") return;
    var first = true;
    var source = new EventSource("/api/v1/runs/" + encodeURIComponent(root.dataset.name) + "/events");
    source.addEventListener("status", function (event) { showStatus(JSON.parse(event.data)); });
    source.addEventListener("resources", function (event) { showResources(JSON.parse(event.data)); });
    source.addEventListener("curves", function (event) { showCurves(JSON.parse(event.data).html); });
    source.addEventListener("log", function (event) {
      var news = JSON.parse(event.data);
      if (first) { first = false; byId("log-last").click(); return; } // what was there before is a page of its own
      addLines(news.lines, news.left_out);
    });
    source.addEventListener("problem", function (event) {
      source.close();
      if (byId("progress")) byId("progress").textContent = JSON.parse(event.data).message;
    });
    source.addEventListener("over", function () { source.close(); location.reload(); });
    source.onerror = function () {  // it tries again unless it was refused
      var isRefused = source.readyState === EventSource.CLOSED;
      if (byId("progress")) byId("progress").textContent = isRefused ? "This page is out of date. Reload it." : explain(new TypeError());
    };
    source.onopen = function () { first = true; };
  }

  // --- the overview -----------------------------------------------------------------------------------------------

  // What has to be read from folders and clusters comes after the page, and again as long as something is under way.
  function listing() {
    var box = byId("listing"), delay = 3000;
    if (!box) return;
    function load() {
      if (document.hidden) { setTimeout(load, delay); return; }
      fetch(box.dataset.part, { credentials: "same-origin", headers: { "Accept": "text/html" } }).then(function (answer) {
        return answer.text().then(function (text) {
          if (!answer.ok) throw new Error(messageIn(text) || "Error " + answer.status);
          return text;
        });
      }).then(function (text) {
        tell("");
        delay = 3000;
        var made = new DOMParser().parseFromString(text, "text/html").body; // rendered and escaped by our own server
        var now = document.activeElement, focused = null;
        if (now && box.contains(now)) focused = now.getAttribute("href") || now.dataset.target;
        var picked = Array.from(box.querySelectorAll("input[name=run]:checked")).map(function (each) { return each.value; });
        box.replaceChildren.apply(box, Array.from(made.childNodes));
        box.querySelectorAll("input[name=run]").forEach(function (each) { each.checked = picked.indexOf(each.value) >= 0; });
        box.dataset.loaded = "yes";
        if (focused) Array.from(box.querySelectorAll("a, button")).filter(function (each) {
          return (each.getAttribute("href") || each.dataset.target) === focused;
        }).slice(0, 1).forEach(function (each) { each.focus(); });
        if (box.querySelector("[data-open=yes]")) setTimeout(load, delay);
      }).catch(function (error) {
        tell(explain(error));
        delay = Math.min(60000, 2 * delay);
        setTimeout(load, delay);
      });
    }
    // What keeps the list from being read, above the list as it was.
    function tell(text) {
      var shown = byId("listing-problem");
      if (!text) { if (shown) shown.remove(); return; }
      if (!shown) {
        shown = element("div", null, { id: "listing-problem", "class": "warnings", role: "alert" });
        box.before(shown);
      }
      if (shown.textContent !== text) shown.textContent = text;
    }
    function messageIn(text) {
      var found = new DOMParser().parseFromString(text, "text/html").querySelectorAll(".warnings p");
      return Array.from(found).map(function (line) { return line.textContent; }).join(" ");
    }
    load();
  }

  function start() {
    actions();
    listing();
    form();
    var root = byId("run");
    if (root) follow(root);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();

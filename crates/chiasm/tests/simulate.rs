//! The command `chiasm simulate`.

use crate::support::chiasm;
use serde_json::Value;

/// Runs a simulation. Returns `true` if it succeeds, its stdout and its stderr.
fn simulate(args: &[&str]) -> (bool, String, String) {
    let workers = if args.contains(&"--workers") { &[][..] } else { &["--workers", "2"] };
    let output = chiasm(&["simulate"]).args(workers).args(args).output().expect("chiasm runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn json_results_are_reproducible() {
    let args = [
        "--requests",
        "400",
        "--workload",
        "shared-image-qa",
        "--policy",
        "kv+media,round-robin",
        "--json",
    ];
    let run = || -> Vec<Value> {
        let (ok, out, err) = simulate(&args);
        assert!(ok, "{err}");
        let lines = out.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        lines
            .map(|mut row: Value| {
                // The only number that depends on the machine.
                row.as_object_mut()
                    .expect("an object")
                    .remove("wall_seconds")
                    .expect("a wall time");
                row
            })
            .collect()
    };
    let rows = run();
    assert_eq!(
        rows.iter().map(|row| &row["policy"]).collect::<Vec<_>>(),
        ["kv+media", "round-robin"]
    );
    for row in &rows {
        assert_eq!(row["completed"], 400, "{row}");
        assert!(row["ttft_ms"]["p90"].as_f64().is_some_and(|p90| p90 > 0.0), "{row}");
    }
    let hit_rate = |row: &Value| row["hit_rate"].as_f64().expect("a hit rate");
    assert!(hit_rate(&rows[0]) > hit_rate(&rows[1]), "{rows:?}");
    assert_eq!(rows, run());
}

#[test]
fn trace_error_names_the_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let trace = dir.path().join("trace.jsonl");
    let line = r#"{"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}"#;
    std::fs::write(&trace, format!("{line}\n{line}\n")).expect("written");
    let path = trace.display().to_string();
    let (ok, out, err) = simulate(&["--trace", &path, "--policy", "kv", "--warm-up", "0"]);
    assert!(ok, "{err}");
    assert!(out.contains("| kv "), "{out}");
    std::fs::write(&trace, format!("{line}\n{{\"timestamp\": 1}}\n")).expect("written");
    let (ok, _, err) = simulate(&["--trace", &path, "--policy", "kv", "--warm-up", "0"]);
    assert!(!ok && err.contains("line 2"), "{err}");
    let (ok, _, err) = simulate(&["--trace", "/nowhere", "--policy", "kv"]);
    assert!(!ok && err.contains("/nowhere"), "{err}");
}

#[test]
fn page_compares_fleets() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("out.html").display().to_string();
    let (ok, out, err) = simulate(&[
        "--workers",
        "1,2",
        "--requests",
        "200",
        "--policy",
        "kv,random",
        "--html",
        &path,
    ]);
    assert!(ok, "{err}");
    assert!(
        out.contains("mixed: 1 workers, 200 requests")
            && out.contains("mixed: 2 workers, 200 requests"),
        "{out}"
    );
    let page = std::fs::read_to_string(&path).expect("a page");
    assert!(
        page.contains("mixed by the number of workers") && page.contains("--policy kv,random"),
        "{page}"
    );
    assert_eq!(page.matches("<figure").count(), 18);
    let (ok, out, err) = simulate(&["--html", "/nowhere/out.html"]);
    assert!(!ok && out.is_empty() && err.contains("/nowhere/out.html"), "{out}{err}");
    let (ok, _, err) = simulate(&["--workers", "2,0"]);
    assert!(!ok && err.contains("from 1 to 100,000"), "{err}");
}

#[test]
fn fleets_with_roles_are_compared_with_those_without() {
    let fleets = ["--workers", "2", "--workers", "prefill=1,decode=1", "--requests", "200"];
    let split =
        ["--policy", "kv+media,random", "--workload", "mixed,unique-images", "--rate", "10"];
    let (ok, out, err) = simulate(&[&fleets[..], &split].concat());
    assert!(ok, "{err}");
    assert!(
        out.contains("mixed: 2 workers, 200")
            && out.contains("mixed: 1 prefill + 1 decode workers, 200"),
        "{out}"
    );
    let (_, comparison) = out.split_once("mixed, side by side").expect("a table of both");
    for line in ["| 2 | kv+media |", "| 2 | random |", "| 1 prefill + 1 decode | kv+media |"] {
        assert!(comparison.contains(line), "{line} in {comparison}");
    }
    let random = out
        .lines()
        .find(|line| line.starts_with("| 1 prefill + 1 decode | random |"))
        .expect("a line");
    assert!(random.contains("| 100.0 % |"), "a policy without costs splits all: {random}");

    let (ok, out, err) = simulate(&[&fleets[..], &split, &["--json"]].concat());
    assert!(ok, "{err}");
    let rows: Vec<Value> =
        out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(rows.len(), 8);
    assert!(rows[0].get("roles").is_none() && rows[0].get("split").is_none(), "{}", rows[0]);
    assert_eq!(
        (&rows[2]["roles"]["prefill"], &rows[2]["roles"]["decode"], &rows[2]["workers"]),
        (&1.into(), &1.into(), &2.into())
    );
    assert!(rows[2]["split"].as_f64().is_some(), "{}", rows[2]);

    let encoders = [
        "--workers",
        "prefill=1,decode=1",
        "--workers",
        "encode=1,aggregated=1",
        "--requests",
        "200",
    ];
    let workload = ["--policy", "random", "--workload", "unique-images", "--rate", "10"];
    let (ok, out, err) = simulate(&[&encoders[..], &workload].concat());
    assert!(ok, "{err}");
    let cells = |fleet: &str| -> Vec<String> {
        let line = out.lines().find(|line| line.starts_with(fleet)).expect("a line");
        line.split(" | ").map(str::to_owned).collect()
    };
    assert_eq!(cells("| fleet | policy")[9..11], ["split", "encoded elsewhere"]);
    assert_eq!(cells("| 1 prefill + 1 decode | random")[9..11], ["100.0 %", "–"]);
    assert_eq!(cells("| 1 encode + 1 aggregated | random")[9..11], ["0.0 %", "100.0 %"]);

    let (ok, _, err) = simulate(&["--workers", "encode=1", "--requests", "200", "--rate", "10"]);
    assert!(!ok && err.contains("add others"), "{err}");
    for wrong in ["prefill=0,decode=0", "prefill=1,prefill=1", "prefil=1", "2,decode=2", "x"] {
        let (ok, _, err) = simulate(&["--workers", wrong]);
        assert!(!ok && err.contains("--workers"), "{wrong}: {err}");
    }
}

//! The processes of launched engines.

use std::collections::HashMap;

use crate::support::Server;

/// Returns the process ids of `root` and all its descendants, from `/proc`.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // "pid (command) state parent …": the command may contain spaces and parentheses.
        let parent =
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children.get(&pid).into_iter().flatten());
        next += 1;
    }
    found
}

pub(crate) fn is_alive(pid: u32) -> bool {
    // A zombie is dead: only its parent has not waited for it yet.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

/// Returns the id of a process of a worker's latest engine, by the name that vLLM gives it. By
/// default, EngineCore has one worker process.
pub(crate) fn engine_process(server: &Server, worker: &str, name: &str) -> u32 {
    let group = server
        .wait_for_log(&format!("engine process started worker={worker} process_group="))
        .parse()
        .expect("a process id");
    let is_named = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|command| command.starts_with(name.as_bytes()))
    };
    descendants(group)
        .into_iter()
        .find(is_named)
        .unwrap_or_else(|| panic!("{worker} has no {name}"))
}

/// vLLM's names of an engine's processes.
pub(crate) const PROCESSES: [&str; 2] = ["VLLM::EngineCore", "VLLM::Worker"];

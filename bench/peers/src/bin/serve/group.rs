//! A program beside this one with all that it starts: a process group, its CPU time, its end.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use peers::programs::failed;
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How long it gets to end by itself: vLLM ends its processes one after the other.
const GRACE: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(50);
/// Lines of a log that go into an error.
const TAIL: usize = 30;
/// Ends the process group `$0` when its standard input ends, which happens when this process does,
/// whatever ended it. Engines that `chiasm` starts in groups of their own have such watchdogs
/// themselves.
const WATCHDOG: &str = r#"read -r _; kill -s KILL -- "-$0" 2>/dev/null"#;
/// The state of a process that has ended, and for which its parent has not waited.
const ENDED: &str = "Z";
/// How the titles of processes begin that are engines or parts of one.
const ENGINES: [&str; 2] = ["VLLM::EngineCore", "VLLM::Worker"];

/// Ends with this value, and with this process.
pub(crate) struct Group {
    name: String,
    leader: Child,
    watchdog: Child,
    log: PathBuf,
}

/// What frontends and engines of a group have spent so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cpu {
    pub(crate) frontend: f64,
    pub(crate) engines: f64,
}

impl Group {
    /// Starts a command with its standard error, and with its output unless that is to be read, in
    /// a file of `dir`.
    pub(crate) fn start(name: &str, command: &mut Command, dir: &Path, is_read: bool) -> Result<Self, Box<dyn Error>> {
        let log = dir.join(format!("{}.log", name.replace(' ', "-")));
        let file = File::create(&log)?;
        match is_read {
            true => command.stdin(Stdio::piped()).stdout(Stdio::piped()),
            false => command.stdin(Stdio::null()).stdout(file.try_clone()?),
        };
        let leader = command.stderr(file).process_group(0).spawn();
        let mut leader =
            leader.map_err(|error| format!("could not start {}: {error}", command.get_program().display()))?;
        let watchdog = Command::new("/bin/sh")
            .args(["-c", WATCHDOG, &leader.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        match watchdog {
            Ok(watchdog) => Ok(Self { name: name.to_owned(), leader, watchdog, log }),
            Err(error) => {
                // It has hardly begun, and has started nothing.
                leader.kill()?;
                leader.wait()?;
                Err(error.into())
            }
        }
    }

    /// The leader, for its pipes.
    pub(crate) fn leader(&mut self) -> &mut Child {
        &mut self.leader
    }

    /// # Errors
    /// The status of a program that has ended, with the end of its log.
    pub(crate) fn check(&mut self) -> Result<(), Box<dyn Error>> {
        match self.leader.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.failed(&format!("ended with {status}"))),
        }
    }

    /// An error about it, with the end of its log.
    pub(crate) fn failed(&self, what: &str) -> Box<dyn Error> {
        failed(&self.name, what, &self.log, TAIL)
    }

    /// Seconds of CPU time, user and system, of all processes that descend from it and still run.
    pub(crate) fn cpu(&self) -> Result<Cpu, Box<dyn Error>> {
        let mut cpu = Cpu::default();
        for process in descendants(self.leader.id())? {
            let title = fs::read(format!("/proc/{}/cmdline", process.id)).unwrap_or_default();
            match ENGINES.iter().any(|engine| title.starts_with(engine.as_bytes())) {
                true => cpu.engines += process.cpu,
                false => cpu.frontend += process.cpu,
            }
        }
        Ok(cpu)
    }
}

impl Cpu {
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self { frontend: self.frontend - earlier.frontend, engines: self.engines - earlier.engines }
    }
}

/// One process of the system.
#[derive(Clone, Debug)]
struct Process {
    id: u32,
    parent: u32,
    /// CPU time that it has spent, in seconds.
    cpu: f64,
    /// When it was started, in ticks since the system was: another process may get its id, but not
    /// at that time.
    start: u64,
}

impl Process {
    fn read(id: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // After the name, which may hold spaces, the state is the first field: proc_pid_stat(5)
        // counts it as the third.
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split_whitespace().collect();
        if fields.first() == Some(&ENDED) {
            return None;
        }
        let number = |counted: usize| fields.get(counted - 3)?.parse::<u64>().ok();
        let cpu = (number(14)? + number(15)?) as f64 / clock_ticks_per_second() as f64;
        Some(Self { id, parent: u32::try_from(number(4)?).ok()?, cpu, start: number(22)? })
    }

    /// Whether it still runs, and is no other.
    fn is_alive(&self) -> bool {
        Self::read(self.id).is_some_and(|now| now.start == self.start)
    }
}

/// A process and all that descend from it.
fn descendants(of: u32) -> Result<Vec<Process>, Box<dyn Error>> {
    let ids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut children: BTreeMap<u32, Vec<Process>> = BTreeMap::new();
    let mut found = Vec::new();
    for process in ids.filter_map(Process::read) {
        match process.id == of {
            true => found.push(process),
            false => children.entry(process.parent).or_default().push(process),
        }
    }
    let mut at = 0;
    while let Some(parent) = found.get(at).map(|process| process.id) {
        found.extend(children.remove(&parent).unwrap_or_default());
        at += 1;
    }
    Ok(found)
}

impl Drop for Group {
    fn drop(&mut self) {
        let started = descendants(self.leader.id()).unwrap_or_default();
        let group = i32::try_from(self.leader.id()).ok().and_then(Pid::from_raw);
        // Signals fail when nobody is left, which is what is wanted.
        let signal = |signal| group.map(|group| kill_process_group(group, signal));
        signal(Signal::TERM);
        let start = Instant::now();
        while started.iter().any(Process::is_alive) && start.elapsed() < GRACE {
            std::thread::sleep(POLL);
        }
        // The leader has not been waited for, so nobody else has the number of its group.
        signal(Signal::KILL);
        for process in started.iter().filter(|process| process.is_alive()) {
            let id = i32::try_from(process.id).ok().and_then(Pid::from_raw);
            let _ = id.map(|id| kill_process(id, Signal::KILL));
        }
        let _ = self.leader.wait();
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_has_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "sleep 600 & sleep 600 & wait"]);
        let group = Group::start("a shell", &mut shell, dir.path(), false).unwrap();
        let start = Instant::now();
        let started = loop {
            let found = descendants(group.leader.id()).unwrap();
            if found.len() == 3 {
                break found;
            }
            assert!(start.elapsed() < GRACE, "{found:?}");
            std::thread::sleep(POLL);
        };
        assert_eq!(group.cpu().unwrap().engines, 0.0);
        drop(group);
        assert!(!started.iter().any(Process::is_alive));
    }
}

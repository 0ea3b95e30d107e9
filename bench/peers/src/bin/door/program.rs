//! Programs that this one starts: their logs, their CPU time, and their end.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// The ports for programs. Systems hand out higher ports, so a port that was promised to one
/// program is not given to another one that starts.
const PORTS: Range<u16> = 20_000..30_000;
/// The time between SIGTERM and SIGKILL. vLLM ends its processes one after the other.
const GRACE: Duration = Duration::from_secs(15);
const LISTEN_TIMEOUT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// The number of log lines in an error.
const TAIL_LINES: usize = 20;
/// Kills the process group `$0` when its standard input ends, which happens whenever this process
/// ends. Engines that `chiasm` starts are in other groups, with their own watchdogs.
const WATCHDOG: &str = r#"read -r _; kill -s KILL -- "-$0" 2>/dev/null"#;
/// The state of a process that has ended, and for which its parent has not waited.
const ZOMBIE: &str = "Z";
/// The beginnings of the titles of processes that belong to engines.
const ENGINES: [&str; 2] = ["VLLM::EngineCore", "VLLM::Worker"];
/// The argument with which our binary is an engine.
const SIMULATED: &[u8] = b"sim-engine";

/// Returns an address on which no process listens now.
pub(crate) fn free_address() -> Result<SocketAddr, Box<dyn Error>> {
    let mut ports = std::iter::repeat_with(|| fastrand::u16(PORTS)).take(PORTS.len());
    let free = ports.find_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok());
    Ok(free.ok_or("no port is free")?.local_addr()?)
}

/// A program with all that it starts, as a process group. It ends when this value is dropped, and
/// when this process ends.
pub(crate) struct Program {
    name: String,
    pub(crate) child: Child,
    watchdog: Child,
    log: PathBuf,
    pub(crate) started: Instant,
}

impl Program {
    /// Starts a program with its output in a file of `dir`.
    pub(crate) fn start(
        name: &str,
        command: &mut Command,
        dir: &Path,
    ) -> Result<Self, Box<dyn Error>> {
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Self::spawn(name, command, log)
    }

    /// Starts a program with pipes, and with its standard error in a file of `dir`.
    pub(crate) fn start_with_pipes(
        name: &str,
        command: &mut Command,
        dir: &Path,
    ) -> Result<Self, Box<dyn Error>> {
        let log = dir.join(format!("{name}.log"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        Self::spawn(name, command, log)
    }

    fn spawn(name: &str, command: &mut Command, log: PathBuf) -> Result<Self, Box<dyn Error>> {
        let started = Instant::now();
        let child = command.process_group(0).spawn();
        let program = command.get_program().display();
        let mut child = child.map_err(|error| format!("could not start {program}: {error}"))?;
        let mut watchdog = Command::new("/bin/sh");
        watchdog.args(["-c", WATCHDOG, &child.id().to_string()]).process_group(0);
        watchdog.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let watchdog = watchdog.spawn().inspect_err(|_| {
            // The program has started no other process yet.
            let _ = child.kill();
        })?;
        Ok(Self { name: name.to_owned(), child, watchdog, log, started })
    }

    /// Returns an error with the status and the end of the log if the program has ended.
    pub(crate) fn check(&mut self) -> Result<(), Box<dyn Error>> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.failed(&format!("ended with {status}"))),
        }
    }

    /// Waits until the program accepts connections at `address`.
    pub(crate) fn wait_for_listener(&mut self, address: SocketAddr) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        while let Err(error) = TcpStream::connect(address) {
            self.check()?;
            if start.elapsed() > LISTEN_TIMEOUT {
                return Err(self.failed(&format!("does not listen at {address}: {error}")));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Returns an error about the program with the end of its log.
    pub(crate) fn failed(&self, what: &str) -> Box<dyn Error> {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n");
        format!("{} {what}; the end of its log:\n{tail}", self.name).into()
    }

    /// Returns the CPU time of all threads of the process, without other processes of the group.
    pub(crate) fn cpu(&self) -> Result<CpuTime, Box<dyn Error>> {
        CpuTime::read([self.id()])
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the resident memory of the process in bytes, with memory that it shares.
    pub(crate) fn resident_bytes(&self) -> Result<u64, Box<dyn Error>> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).ok_or("no VmRSS")?;
        Ok(kib.parse::<u64>()? * 1024)
    }

    /// Returns the running processes that the program has started.
    pub(crate) fn children(&self) -> Result<Vec<u32>, Box<dyn Error>> {
        let children = Process::all()?.filter(|process| process.parent == self.id());
        Ok(children.map(|process| process.id).collect())
    }

    /// Returns the CPU time of all running processes of the group, and of ended ones whose parents
    /// run.
    pub(crate) fn group_cpu(&self) -> Result<GroupCpu, Box<dyn Error>> {
        let mut cpu = GroupCpu::default();
        for process in Process::descendants(self.id())? {
            if process.is_engine() {
                cpu.engines += process.cpu;
            } else {
                cpu.frontend += process.cpu;
            }
        }
        Ok(cpu)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let processes = Process::descendants(self.id()).unwrap_or_default();
        let group = pid(self.id());
        // Signals fail only if the group is empty.
        let signal = |signal| group.map(|group| kill_process_group(group, signal));
        signal(Signal::TERM);
        let start = Instant::now();
        while processes.iter().any(Process::is_alive) && start.elapsed() < GRACE {
            std::thread::sleep(POLL);
        }
        // While the leader has not been waited for, no other process has its id.
        signal(Signal::KILL);
        for process in processes.iter().filter(|process| process.is_alive()) {
            let _ = pid(process.id).map(|id| kill_process(id, Signal::KILL));
        }
        let _ = self.child.wait();
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
    }
}

/// The CPU time of threads, user and system, by their ids. It is exact to the nanosecond. The
/// kernel reports the time of a process in steps of 10 ms, a tenth of what a frontend takes in a
/// measurement on a busy machine.
pub(crate) struct CpuTime(BTreeMap<u32, Duration>);

impl CpuTime {
    /// Reads the CPU time of all threads of these processes.
    pub(crate) fn read(processes: impl IntoIterator<Item = u32>) -> Result<Self, Box<dyn Error>> {
        let mut times = BTreeMap::new();
        for process in processes {
            for thread in fs::read_dir(format!("/proc/{process}/task"))? {
                let thread = thread?;
                // A thread that has just ended has no file any more.
                let Ok(text) = fs::read_to_string(thread.path().join("schedstat")) else {
                    continue;
                };
                let time = text.split(' ').next().ok_or("schedstat has another form")?;
                let id = thread.file_name().to_string_lossy().parse()?;
                times.insert(id, Duration::from_nanos(time.parse()?));
            }
        }
        if times.is_empty() {
            return Err("the kernel has no CPU time of threads (CONFIG_SCHED_INFO)".into());
        }
        Ok(Self(times))
    }

    /// Returns the time since `earlier`, without threads that have ended: all sides keep idle
    /// threads for seconds, longer than a measurement.
    pub(crate) fn since(&self, earlier: &Self) -> Duration {
        let time = |(id, time): (&u32, &Duration)| {
            time.saturating_sub(earlier.0.get(id).copied().unwrap_or_default())
        };
        self.0.iter().map(time).sum()
    }
}

/// The seconds of CPU time of a frontend and its engines.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupCpu {
    pub(crate) frontend: f64,
    pub(crate) engines: f64,
}

/// Returns the running processes of a program with this id, without engines.
pub(crate) fn frontend_processes(id: u32) -> Result<Vec<u32>, Box<dyn Error>> {
    let processes = Process::descendants(id)?.into_iter();
    Ok(processes.filter(|process| !process.is_engine()).map(|process| process.id).collect())
}

fn pid(id: u32) -> Option<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw)
}

/// A running process of the system.
#[derive(Clone, Debug)]
struct Process {
    id: u32,
    parent: u32,
    /// The CPU time in seconds, with that of ended processes for which this one has waited.
    cpu: f64,
    /// The start in ticks since the system's start, which distinguishes processes that reuse an id.
    start: u64,
}

impl Process {
    fn all() -> Result<impl Iterator<Item = Self>, Box<dyn Error>> {
        let ids = fs::read_dir("/proc")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Ok(ids.filter_map(Self::read))
    }

    fn read(id: u32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        // The fields after the name, which may contain spaces. The first one is number three in
        // proc_pid_stat(5).
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split_whitespace().collect();
        if fields.first() == Some(&ZOMBIE) {
            return None;
        }
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let ticks = (14..=17).map(number).sum::<Option<u64>>()?;
        let cpu = ticks as f64 / clock_ticks_per_second() as f64;
        Some(Self { id, parent: u32::try_from(number(4)?).ok()?, cpu, start: number(22)? })
    }

    fn is_engine(&self) -> bool {
        let title = fs::read(format!("/proc/{}/cmdline", self.id)).unwrap_or_default();
        ENGINES.iter().any(|engine| title.starts_with(engine.as_bytes()))
            || title.split(|&byte| byte == 0).any(|argument| argument == SIMULATED)
    }

    fn is_alive(&self) -> bool {
        Self::read(self.id).is_some_and(|now| now.start == self.start)
    }

    /// Returns a process and its descendants.
    fn descendants(id: u32) -> Result<Vec<Self>, Box<dyn Error>> {
        let mut children: BTreeMap<u32, Vec<Self>> = BTreeMap::new();
        let mut found = Vec::new();
        for process in Self::all()? {
            if process.id == id {
                found.push(process);
            } else {
                children.entry(process.parent).or_default().push(process);
            }
        }
        let mut next = 0;
        while let Some(parent) = found.get(next).map(|process| process.id) {
            found.extend(children.remove(&parent).unwrap_or_default());
            next += 1;
        }
        Ok(found)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn program_ends_with_all_its_processes() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "sleep 600 & sleep 600 & wait"]);
        let program = Program::start("a shell", &mut shell, dir.path()).unwrap();
        let start = Instant::now();
        let processes = loop {
            let found = Process::descendants(program.id()).unwrap();
            if found.len() == 3 {
                break found;
            }
            assert!(start.elapsed() < GRACE, "{found:?}");
            std::thread::sleep(POLL);
        };
        assert_eq!(program.group_cpu().unwrap().engines, 0.0);
        drop(program);
        assert!(!processes.iter().any(Process::is_alive));
    }

    #[test]
    fn group_counts_cpu_of_ended_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Command::new("/bin/sh");
        let count = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
        shell.args(["-c", &format!("/bin/sh -c '{count}'; sleep 600 & wait")]);
        let program = Program::start("a shell", &mut shell, dir.path()).unwrap();
        let start = Instant::now();
        let is_asleep = |id: &u32| {
            fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default().starts_with(b"sleep")
        };
        while !program.children().unwrap().iter().any(is_asleep) {
            assert!(start.elapsed() < GRACE);
            std::thread::sleep(POLL);
        }
        let counted = program.group_cpu().unwrap().frontend;
        assert!(counted >= 0.03, "{counted} s");
    }

    #[test]
    fn simulated_engine_is_no_part_of_frontend() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "/bin/sh -c 'sleep 600 & wait' chiasm sim-engine & wait"]);
        let program = Program::start("a shell", &mut shell, dir.path()).unwrap();
        let start = Instant::now();
        let engine = loop {
            let processes = Process::descendants(program.id()).unwrap();
            if let Some(engine) = processes.into_iter().find(Process::is_engine) {
                break engine.id;
            }
            assert!(start.elapsed() < GRACE);
            std::thread::sleep(POLL);
        };
        let frontend = frontend_processes(program.id()).unwrap();
        assert!(frontend.contains(&program.id()) && !frontend.contains(&engine), "{frontend:?}");
    }
}

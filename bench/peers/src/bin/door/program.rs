//! A program beside this one: started, waited for, its CPU time read, ended.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use peers::programs::failed;
use rustix::process::{Pid, Signal, kill_process};

/// How long it gets to end by itself.
const GRACE: Duration = Duration::from_secs(5);
/// How long it gets to listen, where that is waited for.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// Lines of a log that go into an error.
const TAIL: usize = 15;

/// Ends with this value, but not with a killed bench: then the terminal's signal reaches it, as it
/// is in the same group.
pub(crate) struct Program {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Program {
    /// Starts it with its output in a file of `dir`.
    pub(crate) fn start(name: &str, command: &mut Command, dir: &Path) -> Result<Self, Box<dyn Error>> {
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log)?;
        let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn();
        let child = child.map_err(|error| format!("could not start {}: {error}", command.get_program().display()))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// # Errors
    /// The status of a program that has ended, with the end of its log.
    pub(crate) fn check(&mut self) -> Result<(), Box<dyn Error>> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(self.failed(&format!("ended with {status}"))),
        }
    }

    /// Waits until it accepts connections at `address`.
    pub(crate) fn listens(&mut self, address: SocketAddr) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        while let Err(error) = TcpStream::connect(address) {
            self.check()?;
            if start.elapsed() > LISTENS_WITHIN {
                return Err(self.failed(&format!("does not listen at {address}: {error}")));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// An error about it, with the end of its log.
    pub(crate) fn failed(&self, what: &str) -> Box<dyn Error> {
        failed(&self.name, what, &self.log, TAIL)
    }

    /// CPU time of all its threads, without its children.
    pub(crate) fn cpu(&self) -> Result<CpuTime, Box<dyn Error>> {
        CpuTime::of([self.child.id()])
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Processes that it has started and that still run.
    pub(crate) fn children(&self) -> Result<Vec<u32>, Box<dyn Error>> {
        let parent = self.child.id().to_string();
        let ids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        // `ppid` is the fourth. Who has gone since has no file.
        Ok(ids.filter(|&id: &u32| stat(id).is_ok_and(|fields| fields[1] == parent)).collect())
    }
}

/// CPU time of threads so far, user and system, by their ids. To the nanosecond, where that of a
/// process is told in steps of 10 ms, which is a tenth of what a frontend spends while it is
/// measured on a busy machine.
pub(crate) struct CpuTime(BTreeMap<u32, Duration>);

impl CpuTime {
    /// All threads of these processes.
    pub(crate) fn of(processes: impl IntoIterator<Item = u32>) -> Result<Self, Box<dyn Error>> {
        let mut times = BTreeMap::new();
        for process in processes {
            for thread in fs::read_dir(format!("/proc/{process}/task"))? {
                let thread = thread?;
                // One that has just ended has no file any more.
                let Ok(text) = fs::read_to_string(thread.path().join("schedstat")) else { continue };
                let spent = text.split(' ').next().ok_or("/proc/PID/task/TID/schedstat has another form")?;
                let id = thread.file_name().to_string_lossy().parse()?;
                times.insert(id, Duration::from_nanos(spent.parse()?));
            }
        }
        if times.is_empty() {
            return Err("the kernel does not tell what threads spend (CONFIG_SCHED_INFO)".into());
        }
        Ok(Self(times))
    }

    /// What was spent since `earlier`, but by threads that have ended: those of all sides end when
    /// they had nothing to do for seconds, which is longer than a measurement.
    pub(crate) fn since(&self, earlier: &Self) -> Duration {
        let spent = |(id, time): (&u32, &Duration)| time.saturating_sub(earlier.0.get(id).copied().unwrap_or_default());
        self.0.iter().map(spent).sum()
    }
}

/// The fields of `/proc/PID/stat` after the name, which may hold spaces.
fn stat(id: u32) -> Result<Vec<String>, Box<dyn Error>> {
    let text = fs::read_to_string(format!("/proc/{id}/stat"))?;
    let (_, fields) = text.rsplit_once(") ").ok_or("/proc/PID/stat has another form")?;
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

impl Drop for Program {
    fn drop(&mut self) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(id) = id
            && self.check().is_ok()
        {
            // Fails when it has just ended, which is what is wanted.
            let _ = kill_process(id, Signal::TERM);
        }
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < GRACE {
            std::thread::sleep(POLL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

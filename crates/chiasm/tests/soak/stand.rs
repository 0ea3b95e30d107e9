//! The frontend and the engines under test, and the faults injected into them.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::support::{Process, Server, chiasm, demo_model, free_port, send_signal, wait_for};

pub(crate) const ENGINES: usize = 3;

/// The file that fills `/dev/shm`.
const FILLER: &str = "/dev/shm/chiasm-soak";

/// Small limits, so that the load reaches them.
const FLAGS: &[&str] = &[
    "--served-model-name",
    "m",
    "--allow-private-media",
    "--receiver-cache-gb",
    "0.01",
    "--mm-arena-gb",
    "0.05",
    "--engine-timeout",
    "0.5",
    "--engine-hang-timeout",
    "1.5",
    "--first-token-timeout",
    "10",
    "--request-timeout",
    "20",
    "--max-requests",
    "48",
    "--max-connections",
    "96",
    "--body-timeout",
    "5",
    "--head-timeout",
    "5",
    "--write-timeout",
    "3",
    "--max-bytes-in-flight",
    "134217728",
    "--media-cache-bytes",
    "33554432",
    "--media-timeout",
    "3",
    "--quarantine",
    "1",
];

pub(crate) struct TestHarness {
    pub(crate) frontend: Server,
    model: String,
    addresses: Vec<String>,
    engines: Vec<Engine>,
    /// The time at which `/dev/shm` is emptied again.
    shm_full_until: Option<Instant>,
    /// The time at which the descriptor limit is lifted, and the limit to restore.
    few_descriptors: Option<(Instant, Rlimit)>,
    /// The time of the last fault that affects readiness, or of its end.
    disturbed_at: Instant,
}

struct Engine {
    process: Process,
    /// The time at which the engine is resumed.
    frozen_until: Option<Instant>,
}

impl TestHarness {
    pub(crate) async fn start() -> Self {
        let model = demo_model().display().to_string();
        let addresses: Vec<_> =
            (0..ENGINES).map(|_| format!("tcp://127.0.0.1:{}", free_port())).collect();
        let attach = addresses.join(",");
        let frontend = Server::start(&[&[&model, "--attach", &attach], FLAGS].concat());
        let engines = addresses.iter().map(|address| engine(&model, address)).collect();
        let harness = Self {
            frontend,
            model,
            addresses,
            engines,
            shm_full_until: None,
            few_descriptors: None,
            disturbed_at: Instant::now(),
        };
        harness.frontend.wait_ready(ENGINES as u64, Duration::from_secs(30)).await;
        harness
    }

    pub(crate) fn address(&self) -> String {
        self.frontend.url.trim_start_matches("http://").to_owned()
    }

    /// Kills an engine and starts a replacement at the same address.
    pub(crate) fn kill_engine(&mut self, index: usize) {
        // Dropping the old engine kills its process.
        self.engines[index] = engine(&self.model, &self.addresses[index]);
        self.disturbed_at = Instant::now();
    }

    /// Stops an engine's process for `time`.
    pub(crate) fn freeze_engine(&mut self, index: usize, time: Duration) {
        let engine = &mut self.engines[index];
        send_signal(engine.process.0.id(), "STOP");
        engine.frozen_until = Some(Instant::now() + time);
        self.disturbed_at = Instant::now();
    }

    /// Returns the address at which the frontend waits for an engine.
    pub(crate) fn engine_address(&self, index: usize) -> String {
        self.addresses[index].trim_start_matches("tcp://").to_owned()
    }

    /// Fills `/dev/shm` for `time`.
    pub(crate) fn fill_shm(&mut self, time: Duration) {
        let mut filler =
            File::options().append(true).create(true).open(FILLER).expect("a file in /dev/shm");
        let chunk = vec![1; 1 << 20];
        while filler.write_all(&chunk).is_ok() {}
        self.shm_full_until = Some(Instant::now() + time);
    }

    /// Limits the frontend to `more` additional descriptors for `time`. Does nothing if a limit is
    /// active already.
    pub(crate) fn limit_descriptors(&mut self, more: u64, time: Duration) {
        if self.few_descriptors.is_some() {
            return;
        }
        let current = Some(self.descriptors() as u64 + more);
        let limit = Rlimit { current, ..getrlimit(Resource::Nofile) };
        let previous = self.set_descriptor_limit(limit);
        self.few_descriptors = Some((Instant::now() + time, previous));
    }

    /// Sets the frontend's descriptor limit and returns the previous one.
    fn set_descriptor_limit(&self, limit: Rlimit) -> Rlimit {
        prlimit(Some(self.frontend_pid()), Resource::Nofile, limit).expect("the limit is set")
    }

    fn frontend_pid(&self) -> Pid {
        Pid::from_raw(self.frontend.pid().cast_signed()).expect("a process")
    }

    /// Stops reading the frontend's log for `time`.
    pub(crate) fn stall_log(&self, time: Duration) {
        self.frontend.stall_log(time);
    }

    /// Reverts the faults whose time is over.
    ///
    /// # Panics
    /// If an engine has exited by itself, which it does when it receives wrong data.
    pub(crate) fn revert_expired_faults(&mut self) {
        let now = Instant::now();
        for engine in &mut self.engines {
            let status = engine.process.0.try_wait().expect("a status");
            assert!(status.is_none(), "an engine has exited by itself: {status:?}");
            if engine.frozen_until.take_if(|until| *until <= now).is_some() {
                send_signal(engine.process.0.id(), "CONT");
                self.disturbed_at = now;
            }
        }
        if self.shm_full_until.take_if(|until| *until <= now).is_some() {
            std::fs::remove_file(FILLER).expect("the filler is removed");
        }
        if let Some((_, previous)) = self.few_descriptors.take_if(|(until, _)| *until <= now) {
            self.set_descriptor_limit(previous);
            self.disturbed_at = now;
        }
    }

    /// Reverts all faults at once.
    pub(crate) fn revert_all_faults(&mut self) {
        if self.shm_full_until.take().is_some() {
            std::fs::remove_file(FILLER).expect("the filler is removed");
        }
        if let Some((_, previous)) = self.few_descriptors.take() {
            self.set_descriptor_limit(previous);
        }
        for engine in &mut self.engines {
            if engine.frozen_until.take().is_some() {
                send_signal(engine.process.0.id(), "CONT");
            }
        }
    }

    /// Returns the time since the last fault that affects readiness ended. Zero while an engine is
    /// frozen or descriptors are limited.
    pub(crate) fn undisturbed_for(&self) -> Duration {
        let is_frozen = self.engines.iter().any(|engine| engine.frozen_until.is_some());
        if is_frozen || self.few_descriptors.is_some() {
            Duration::ZERO
        } else {
            self.disturbed_at.elapsed()
        }
    }

    pub(crate) async fn ready_workers(&self) -> u64 {
        self.frontend.ready_workers().await
    }

    /// Returns the bytes of the frontend's resident memory, without shared memory.
    pub(crate) fn resident(&self) -> u64 {
        self.frontend.resident()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.frontend.pid()))
            .expect("the frontend lives")
            .count()
    }

    /// Asserts that connections are closed and that the frontend's shared memory is removed.
    pub(crate) async fn assert_resources_released(self) {
        // What remains: sockets of three engines and their events, the listener, this test's own
        // connections, and descriptors of the runtime.
        wait_for("connections to be closed", Duration::from_secs(20), async || {
            self.descriptors() < 120
        })
        .await;
        let pid = self.frontend.pid();
        assert!(self.frontend.terminate(Duration::from_secs(40)).await, "an orderly shutdown");
        let names = std::fs::read_dir("/dev/shm").expect("/dev/shm").flatten();
        let left = names.filter(|entry| {
            entry.file_name().to_string_lossy().starts_with(&format!("chiasm.{pid}."))
        });
        assert_eq!(left.count(), 0);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}

fn engine(model: &str, address: &str) -> Engine {
    let args =
        ["sim-engine", "--handshake", address, "--model", model, "--receiver-cache-gb", "0.01"];
    let fast = ["--sim-decode-rate", "500", "--sim-image-ms", "2"];
    let child = chiasm(&args)
        .args(fast)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("an engine");
    Engine { process: Process(child), frozen_until: None }
}

//! The frontend and its engines, all processes that can be hurt.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::support::{Process, Server, chiasm, demo_model, free_port, send_signal, wait_for};

pub(crate) const ENGINES: usize = 3;

const FILLER: &str = "/dev/shm/chiasm-soak";

/// Small limits, so that they are met.
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

pub(crate) struct Stand {
    pub(crate) frontend: Server,
    model: String,
    addresses: Vec<String>,
    engines: Vec<Engine>,
    /// Until when `/dev/shm` is full.
    shm_full_until: Option<Instant>,
    /// Until when the frontend may have no more descriptors, and what it may have then.
    few_descriptors: Option<(Instant, Rlimit)>,
    touched: Instant,
}

struct Engine {
    process: Process,
    /// When it is to go on.
    frozen_until: Option<Instant>,
}

impl Stand {
    pub(crate) async fn start() -> Self {
        let model = demo_model().display().to_string();
        let addresses: Vec<_> =
            (0..ENGINES).map(|_| format!("tcp://127.0.0.1:{}", free_port())).collect();
        let attach = addresses.join(",");
        let frontend = Server::start(&[&[&model, "--attach", &attach], FLAGS].concat());
        let engines = addresses.iter().map(|address| engine(&model, address)).collect();
        let (shm_full_until, few_descriptors) = (None, None);
        let touched = Instant::now();
        let stand =
            Self { frontend, model, addresses, engines, shm_full_until, few_descriptors, touched };
        stand.frontend.wait_ready(ENGINES as u64, Duration::from_secs(30)).await;
        stand
    }

    pub(crate) fn address(&self) -> String {
        self.frontend.url.trim_start_matches("http://").to_owned()
    }

    /// Kills an engine and starts another one in its place.
    pub(crate) fn kill_engine(&mut self, index: usize) {
        // The old one is killed as it is replaced.
        self.engines[index] = engine(&self.model, &self.addresses[index]);
        self.touched = Instant::now();
    }

    pub(crate) fn freeze_engine(&mut self, index: usize, time: Duration) {
        let engine = &mut self.engines[index];
        send_signal(engine.process.0.id(), "STOP");
        engine.frozen_until = Some(Instant::now() + time);
        self.touched = Instant::now();
    }

    /// Where the frontend waits for an engine.
    pub(crate) fn engine_address(&self, index: usize) -> String {
        self.addresses[index].trim_start_matches("tcp://").to_owned()
    }

    /// Leaves no room in `/dev/shm` for this long.
    pub(crate) fn fill_shm(&mut self, time: Duration) {
        let mut filler =
            File::options().append(true).create(true).open(FILLER).expect("a file in /dev/shm");
        let piece = vec![1; 1 << 20];
        while filler.write_all(&piece).is_ok() {}
        self.shm_full_until = Some(Instant::now() + time);
    }

    /// Lets the frontend open so many descriptors more and no others for this long, unless it is so
    /// already.
    pub(crate) fn limit_descriptors(&mut self, more: u64, time: Duration) {
        if self.few_descriptors.is_some() {
            return;
        }
        let current = Some(self.descriptors() as u64 + more);
        let few = Rlimit { current, ..getrlimit(Resource::Nofile) };
        let usual =
            prlimit(Some(self.frontend_pid()), Resource::Nofile, few).expect("its limit is set");
        self.few_descriptors = Some((Instant::now() + time, usual));
    }

    fn frontend_pid(&self) -> Pid {
        Pid::from_raw(self.frontend.pid().cast_signed()).expect("a process")
    }

    /// Nobody reads the log for this long.
    pub(crate) fn stall_log(&self, time: Duration) {
        self.frontend.stall_log(time);
    }

    /// Lets engines go on whose time has come. An engine that ended by itself has found something
    /// wrong.
    pub(crate) fn tend(&mut self) {
        let now = Instant::now();
        for engine in &mut self.engines {
            let ended = engine.process.0.try_wait().expect("it can be asked");
            assert!(ended.is_none(), "an engine that nobody killed has ended: {ended:?}");
            if engine.frozen_until.take_if(|until| *until <= now).is_some() {
                send_signal(engine.process.0.id(), "CONT");
                self.touched = now;
            }
        }
        if self.shm_full_until.take_if(|until| *until <= now).is_some() {
            std::fs::remove_file(FILLER).expect("the filler goes");
        }
        if let Some((_, usual)) = self.few_descriptors.take_if(|(until, _)| *until <= now) {
            prlimit(Some(self.frontend_pid()), Resource::Nofile, usual).expect("its limit is set");
            self.touched = now;
        }
    }

    pub(crate) fn calm_down(&mut self) {
        if self.shm_full_until.take().is_some() {
            std::fs::remove_file(FILLER).expect("the filler goes");
        }
        if let Some((_, usual)) = self.few_descriptors.take() {
            prlimit(Some(self.frontend_pid()), Resource::Nofile, usual).expect("its limit is set");
        }
        for engine in &mut self.engines {
            if engine.frozen_until.take().is_some() {
                send_signal(engine.process.0.id(), "CONT");
            }
        }
    }

    /// Time since an engine was last killed, frozen or thawed, or descriptors were few; none while
    /// one is frozen or they are.
    pub(crate) fn untouched_for(&self) -> Duration {
        let is_frozen = self.engines.iter().any(|engine| engine.frozen_until.is_some());
        if is_frozen || self.few_descriptors.is_some() {
            Duration::ZERO
        } else {
            self.touched.elapsed()
        }
    }

    pub(crate) async fn ready_workers(&self) -> u64 {
        self.frontend.ready_workers().await
    }

    /// Bytes of the frontend that are resident and its own.
    pub(crate) fn resident(&self) -> u64 {
        self.frontend.resident()
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.frontend.pid())).expect("it lives").count()
    }

    /// The end: connections are closed, and what is shared is gone with the frontend.
    pub(crate) async fn has_given_everything_back(self) {
        // Sockets of three engines and their events, of the listener and of who asks here, and what
        // the runtime has open.
        wait_for("connections to be closed", Duration::from_secs(20), async || {
            self.descriptors() < 120
        })
        .await;
        let pid = self.frontend.pid();
        assert!(self.frontend.terminate(Duration::from_secs(40)).await, "an orderly end");
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

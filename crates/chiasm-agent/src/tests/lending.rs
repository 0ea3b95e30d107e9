//! Tensors that agents read from frontends' memory.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use chiasm_backend::TensorFormat;
use chiasm_kv::KeySecret;
use chiasm_nixl::{Lender, Settings};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tonic::Code;

use super::tensors::{MadeTensors, with_recording};
use super::*;
use crate::CHUNK_BYTES;
use crate::client::{Lending, OwnMemory};
use crate::proto::ReadTensorsRequest;

const MIB: usize = 1 << 20;
/// The size of lent tensors: more than fits into one message, and no more than the test agent
/// takes.
const LENT_BYTES: usize = 3 * CHUNK_BYTES;

fn settings(pool_bytes: usize) -> Settings {
    let library = std::env::var_os("CHIASM_TEST_NIXL");
    let library =
        library.expect("CHIASM_TEST_NIXL names NIXL's libnixl_capi.so: `cargo xtask test` sets it");
    Settings {
        library: PathBuf::from(library),
        pool_bytes,
        read_timeout: Duration::from_secs(20),
        devices: Some("lo".to_owned()),
    }
}

/// The counts of a frontend.
#[derive(Default)]
struct Counts {
    lent: AtomicU64,
    sent: AtomicU64,
    stepped_down: Mutex<HashMap<&'static str, usize>>,
}

impl MediaObserver for Counts {
    fn delivered(&self, _: MediaDelivery) {}

    fn missed(&self, _: usize) {}

    fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Relaxed);
    }

    fn lent(&self, bytes: u64) {
        self.lent.fetch_add(bytes, Relaxed);
    }

    fn stepped_down(&self, cause: &'static str, _: &dyn std::fmt::Display) {
        *self.stepped_down.lock().unwrap().entry(cause).or_default() += 1;
    }
}

impl Counts {
    /// Returns the bytes lent, the bytes sent, and the steps down.
    fn all(&self) -> (u64, u64, HashMap<&'static str, usize>) {
        (
            self.lent.load(Relaxed),
            self.sent.load(Relaxed),
            self.stepped_down.lock().unwrap().clone(),
        )
    }
}

/// Transfers tensors of `bytes` bytes to an engine, and checks that they arrive unchanged.
async fn deliver(harness: &TestHarness, lending: Lending, bytes: usize) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    let engine =
        harness.connect_over(harness.link.clone().with_lending(&lending), counts.clone()).await;
    let made = MadeTensors::with_bytes(bytes);
    let mut job = with_recording(made.clone(), vec![true; 3]);
    // A new item, which the agent has not kept.
    job.media = vec![JobItem { hash: MmHash::new(rand::random()), ..job.media[0].clone() }].into();
    harness.engine.next_job(Script::tokens(&[1, 2]));
    assert_eq!(
        delivered(&*engine, &job).await.unwrap(),
        MediaDelivery { inline: 1, ..MediaDelivery::default() }
    );
    let item = harness.engine.jobs().last().unwrap().media[0].clone();
    let request = TensorRequest {
        format: TensorFormat::Raw,
        model_dtype: None,
        memory: Arc::new(OwnMemory),
        is_still_needed: Arc::new(|| true),
    };
    let received = item.source.tensors(request).await.unwrap().unwrap();
    assert!(format!("{received:?}") == format!("{:?}", made.fields), "other tensors arrived");
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_without_nixl_are_sent_as_a_counted_step_down() {
    let harness = TestHarness::new().await;
    let bytes = LENT_BYTES as u64;
    assert_eq!(
        deliver(&harness, Lending::default(), LENT_BYTES).await.all(),
        (0, bytes, HashMap::new())
    );
    let failed = || Lending::unavailable("there is no library");
    let not_here = HashMap::from([("nixl_not_here", 1)]);
    assert_eq!(deliver(&harness, failed(), LENT_BYTES).await.all(), (0, bytes, not_here));
    // Tensors that fit into one message are never lent.
    assert_eq!(deliver(&harness, failed(), 100).await.all(), (0, 100, HashMap::new()));
    let (_, mut files) = harness.link.clients();
    let status = files.read_tensors(ReadTensorsRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn tensors_are_read_by_nixl_or_sent() {
    let lender = |bytes| Lending::new(Arc::new(Lender::start(&settings(bytes)).unwrap()));
    let reading = async |bytes| {
        TestHarness::with_reader(
            FakeBackend::new(),
            Arc::default(),
            Some(Reader::start(&settings(bytes)).unwrap()),
        )
        .await
    };
    let bytes = LENT_BYTES as u64;
    let no_room = HashMap::from([("nixl_no_room", 1)]);
    let harness = reading(16 * MIB).await;
    let lending = lender(MIB);
    // More than fit into the frontend's pool at a time.
    for _ in 0..8 {
        assert_eq!(
            deliver(&harness, lending.clone(), LENT_BYTES).await.all(),
            (bytes, 0, HashMap::new())
        );
    }
    assert_eq!(deliver(&harness, lending.clone(), 100).await.all(), (0, 100, HashMap::new()));
    assert_eq!(
        deliver(&harness, lender(MIB / 2), LENT_BYTES).await.all(),
        (0, bytes, no_room.clone())
    );
    let crowded = reading(MIB / 2).await;
    assert_eq!(deliver(&crowded, lending.clone(), LENT_BYTES).await.all(), (0, bytes, no_room));
    let not_there = HashMap::from([("nixl_not_there", 1)]);
    assert_eq!(
        deliver(&TestHarness::new().await, lending, LENT_BYTES).await.all(),
        (0, bytes, not_there)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn loans_are_checked_before_reads_by_nixl() {
    let reader = Reader::start(&settings(16 * MIB)).unwrap();
    let harness = TestHarness::with_reader(FakeBackend::new(), Arc::default(), Some(reader)).await;
    let lender = Lender::start(&settings(8 * MIB)).unwrap();
    let fields = MadeTensors::with_bytes(LENT_BYTES).fields.clone();
    let loan = lender.lend(&crate::tensors::tensor_bytes(&fields)).unwrap();
    let request = ReadTensorsRequest {
        mm_hash: Bytes::from_static(&[5; 32]),
        fields: crate::tensors::describe(&fields),
        memory: lender.metadata().clone(),
        address: loan.address(),
        loan: loan.number(),
        within_ms: 20_000,
    };
    let (_, mut files) = harness.link.clients();
    let mut read = async |request: &ReadTensorsRequest| files.read_tensors(request.clone()).await;
    assert_eq!(read(&request).await.unwrap().into_inner().not_read, "");
    let large = crate::tensors::describe(&MadeTensors::with_bytes(2 * MIB).fields);
    for refused in [
        ReadTensorsRequest { mm_hash: Bytes::new(), ..request.clone() },
        ReadTensorsRequest { fields: large, ..request.clone() },
        ReadTensorsRequest {
            fields: vec![crate::proto::TensorField::default()],
            ..request.clone()
        },
    ] {
        assert_eq!(read(&refused).await.unwrap_err().code(), Code::InvalidArgument);
    }
    for (not_read, cause) in [
        (ReadTensorsRequest { loan: request.loan ^ 1, ..request.clone() }, "nixl_over"),
        (ReadTensorsRequest { loan: 0, ..request.clone() }, "nixl_over"),
        (ReadTensorsRequest { memory: Bytes::from_static(b"x"), ..request.clone() }, "nixl_failed"),
        (
            ReadTensorsRequest { memory: Bytes::from(vec![0; MIB / 2]), ..request.clone() },
            "nixl_failed",
        ),
        // Memory that was never registered.
        (ReadTensorsRequest { address: 4096, ..request.clone() }, "nixl_failed"),
        (ReadTensorsRequest { within_ms: 0, ..request.clone() }, "nixl_slow"),
    ] {
        assert_eq!(read(&not_read).await.unwrap().into_inner().not_read, cause);
    }
    drop(loan);
    assert_eq!(read(&request).await.unwrap().into_inner().not_read, "nixl_over");
}

/// The environment variable that makes a process of this test binary an agent. Its value is the
/// secret of block keys.
const AGENT_SECRET_VARIABLE: &str = "CHIASM_AGENT_READS";

/// Not a test, but an agent in a process of its own, which prints its address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn agent_that_reads_by_nixl() {
    let Ok(secret) = std::env::var(AGENT_SECRET_VARIABLE) else { return };
    let secret: Vec<u8> = secret.split(' ').map(|byte| byte.parse().unwrap()).collect();
    KeySecret::new(secret.try_into().unwrap()).use_in_process().unwrap();
    let reader = Reader::start(&settings(128 * MIB)).unwrap();
    let harness = TestHarness::with_reader(FakeBackend::new(), Arc::default(), Some(reader)).await;
    println!("reads {}", harness.link.address());
    std::future::pending().await
}

/// A process that is killed on drop.
struct Process(Child);

impl Process {
    /// Starts an agent. Returns it with its address.
    fn agent() -> (Self, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "tests::lending::agent_that_reads_by_nixl",
            "--ignored",
            "--nocapture",
        ]);
        let secret = KeySecret::for_process().as_bytes().map(|byte| byte.to_string()).join(" ");
        command.env(AGENT_SECRET_VARIABLE, secret);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address =
            lines.find_map(|line| Some(line.unwrap().split_once("reads ")?.1.to_owned())).unwrap();
        (Self(child), address)
    }

    /// Stops or kills the process, and waits for it: until then its threads may answer a request.
    fn signal_and_wait(&self, signal: Signal) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).unwrap();
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), options).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A call to a stopped or killed agent ends soon, but the loan's memory is not reused for as long
/// as the agent may read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn memory_of_a_loan_by_nixl_to_a_lost_agent_is_not_reused() {
    let read_timeout = Duration::from_secs(2);
    let lender = Arc::new(Lender::start(&Settings { read_timeout, ..settings(MIB) }).unwrap());
    let fields = MadeTensors::with_bytes(LENT_BYTES).fields.clone();
    for signal in [Signal::STOP, Signal::KILL] {
        let connect = async |address: &str| {
            let link =
                AgentLink::new(address, None).unwrap().with_lending(&Lending::new(lender.clone()));
            link.greet().await.unwrap();
            link
        };
        let (agent, address) = Process::agent();
        let link = connect(&address).await;
        let hash = || MmHash::new(rand::random());
        assert!(link.lend_tensors(&hash(), &fields).await.is_ok_and(|is_read| is_read));
        agent.signal_and_wait(signal);
        let start = Instant::now();
        let not_lent = link.lend_tensors(&hash(), &fields).await.err().unwrap();
        // Keep-alive pings detect the lost connection by then.
        assert!(
            not_lent.cause == "nixl_unanswered" && start.elapsed() < Duration::from_secs(6),
            "{}",
            not_lent.reason
        );
        // Until the read timeout the memory is not lent to another agent; then it is.
        let (_other, address) = Process::agent();
        let link = connect(&address).await;
        let mut refused = 0;
        while let Err(not_lent) = link.lend_tensors(&hash(), &fields).await {
            assert!(
                not_lent.cause == "nixl_no_room" && start.elapsed() < Duration::from_secs(20),
                "{}",
                not_lent.reason
            );
            refused += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(refused > 0 && start.elapsed() > read_timeout, "after {:?}", start.elapsed());
    }
}

//! Tensors that agents read out of frontends' memory.

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
use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;

use super::tensors::{Made, with_recording};
use super::*;
use crate::CHUNK;
use crate::client::{Lending, OwnMemory};
use crate::proto::ReadTensorsRequest;

const MIB: usize = 1 << 20;
/// More than one message carries, and no more than the stand's agent takes.
const LENT: usize = 3 * CHUNK;

fn settings(pool_bytes: usize) -> Settings {
    let library = std::env::var_os("CHIASM_TEST_NIXL");
    let library =
        library.expect("CHIASM_TEST_NIXL names NIXL's libnixl_capi.so: `cargo xtask test` sets it");
    let within = Duration::from_secs(20);
    Settings { library: PathBuf::from(library), pool_bytes, within, devices: Some("lo".to_owned()) }
}

/// What a frontend counts.
#[derive(Default)]
struct Counts {
    lent: AtomicU64,
    sent: AtomicU64,
    stepped_down: Mutex<HashMap<&'static str, usize>>,
}

impl MediaObserver for Counts {
    fn delivered(&self, _: Delivered) {}

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
    /// Bytes that were lent and sent, and the steps down.
    fn all(&self) -> (u64, u64, HashMap<&'static str, usize>) {
        (
            self.lent.load(Relaxed),
            self.sent.load(Relaxed),
            self.stepped_down.lock().unwrap().clone(),
        )
    }
}

/// Has an engine get tensors of so many bytes, and checks that they come as they are.
async fn deliver(stand: &Stand, lending: Lending, bytes: usize) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    let engine =
        stand.connect_over(stand.link.clone().with_lending(&lending), counts.clone()).await;
    let made = Made::of(bytes);
    let mut told = with_recording(made.clone(), vec![true; 3]);
    // Not one that the agent has kept.
    told.media =
        vec![JobItem { hash: MmHash::new(rand::random()), ..told.media[0].clone() }].into();
    stand.engine.next_job(Script::tokens(&[1, 2]));
    assert_eq!(
        delivered(&*engine, &told).await.unwrap(),
        Delivered { inline: 1, ..Delivered::default() }
    );
    let item = stand.engine.jobs().last().unwrap().media[0].clone();
    let order = TensorOrder {
        format: TensorFormat::Raw,
        memory: Arc::new(OwnMemory),
        still_wanted: Arc::new(|| true),
    };
    let came = item.source.tensors(order).await.unwrap().unwrap();
    assert!(format!("{came:?}") == format!("{:?}", made.fields), "other tensors came");
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_nixl_on_either_side_tensors_are_sent_and_that_is_counted() {
    let stand = Stand::new().await;
    let bytes = LENT as u64;
    assert_eq!(deliver(&stand, Lending::default(), LENT).await.all(), (0, bytes, HashMap::new()));
    let failed = || Lending::unavailable("there is no library");
    let not_here = HashMap::from([("nixl_not_here", 1)]);
    assert_eq!(deliver(&stand, failed(), LENT).await.all(), (0, bytes, not_here));
    // What one message carries was not to be read.
    assert_eq!(deliver(&stand, failed(), 100).await.all(), (0, 100, HashMap::new()));
    let (_, mut files) = stand.link.clients();
    let status = files.read_tensors(ReadTensorsRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn tensors_are_read_by_nixl_as_they_are_or_sent() {
    let lender = |bytes| Lending::new(Arc::new(Lender::start(&settings(bytes)).unwrap()));
    let reading = async |bytes| {
        Stand::reading(
            FakeBackend::new(),
            Arc::default(),
            Some(Reader::start(&settings(bytes)).unwrap()),
        )
        .await
    };
    let (bytes, no_room) = (LENT as u64, HashMap::from([("nixl_no_room", 1)]));
    let (stand, lending) = (reading(16 * MIB).await, lender(MIB));
    // More of them than the frontend has room for at a time.
    for _ in 0..8 {
        assert_eq!(deliver(&stand, lending.clone(), LENT).await.all(), (bytes, 0, HashMap::new()));
    }
    assert_eq!(deliver(&stand, lending.clone(), 100).await.all(), (0, 100, HashMap::new()));
    assert_eq!(deliver(&stand, lender(MIB / 2), LENT).await.all(), (0, bytes, no_room.clone()));
    let crowded = reading(MIB / 2).await;
    assert_eq!(deliver(&crowded, lending.clone(), LENT).await.all(), (0, bytes, no_room));
    let not_there = HashMap::from([("nixl_not_there", 1)]);
    assert_eq!(deliver(&Stand::new().await, lending, LENT).await.all(), (0, bytes, not_there));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn an_agent_checks_what_is_lent_before_it_reads_by_nixl() {
    let reader = Reader::start(&settings(16 * MIB)).unwrap();
    let stand = Stand::reading(FakeBackend::new(), Arc::default(), Some(reader)).await;
    let lender = Lender::start(&settings(8 * MIB)).unwrap();
    let fields = Made::of(LENT).fields.clone();
    let loan = lender.lend(&crate::tensors::parts(&fields)).unwrap();
    let request = ReadTensorsRequest {
        mm_hash: Bytes::from_static(&[5; 32]),
        fields: crate::tensors::announcement(&fields),
        memory: lender.metadata().clone(),
        address: loan.address(),
        loan: loan.number(),
        within_ms: 20_000,
    };
    let (_, mut files) = stand.link.clients();
    let mut read = async |request: &ReadTensorsRequest| files.read_tensors(request.clone()).await;
    assert_eq!(read(&request).await.unwrap().into_inner().not_read, "");
    let large = crate::tensors::announcement(&Made::of(2 * MIB).fields);
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

/// What tells a process of this program that it is to be an agent, and what to make block keys
/// with.
const AGENT: &str = "CHIASM_AGENT_READS";

/// No test, but an agent in a process of its own, which says where it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn what_reads_by_nixl() {
    let Ok(secret) = std::env::var(AGENT) else { return };
    let secret: Vec<u8> = secret.split(' ').map(|byte| byte.parse().unwrap()).collect();
    KeySecret::new(secret.try_into().unwrap()).use_in_process().unwrap();
    let reader = Reader::start(&settings(128 * MIB)).unwrap();
    let stand = Stand::reading(FakeBackend::new(), Arc::default(), Some(reader)).await;
    println!("reads {}", stand.link.address());
    std::future::pending().await
}

/// A process that ends with this.
struct Process(Child);

impl Process {
    /// An agent, and where it is.
    fn agent() -> (Self, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::lending::what_reads_by_nixl", "--ignored", "--nocapture"]);
        let secret = KeySecret::of_process().as_bytes().map(|byte| byte.to_string()).join(" ");
        command.env(AGENT, secret);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut says = BufReader::new(child.stdout.take().unwrap()).lines();
        let address =
            says.find_map(|line| Some(line.unwrap().split_once("reads ")?.1.to_owned())).unwrap();
        (Self(child), address)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A call that a stopped or killed agent does not answer ends soon, and the memory of its loan
/// rests for as long as the agent may read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn a_loan_by_nixl_to_an_agent_that_says_nothing_any_more_rests() {
    let within = Duration::from_secs(2);
    let lender = Arc::new(Lender::start(&Settings { within, ..settings(MIB) }).unwrap());
    let fields = Made::of(LENT).fields.clone();
    for signal in [Signal::STOP, Signal::KILL] {
        let lend = async |address: &str| {
            let link =
                AgentLink::new(address, None).unwrap().with_lending(&Lending::new(lender.clone()));
            link.greet().await.unwrap();
            link
        };
        let (agent, address) = Process::agent();
        let link = lend(&address).await;
        let hash = || MmHash::new(rand::random());
        assert!(link.lend_tensors(&hash(), &fields).await.is_ok_and(|is_read| is_read));
        agent.signal(signal);
        let since = Instant::now();
        let why = link.lend_tensors(&hash(), &fields).await.err().unwrap();
        // The connection is found to be lost, at the latest.
        assert!(
            why.cause == "nixl_unanswered" && since.elapsed() < Duration::from_secs(6),
            "{}",
            why.why
        );
        // Meanwhile nobody else has the memory; then another agent does.
        let (_other, address) = Process::agent();
        let link = lend(&address).await;
        let mut refused = 0;
        while let Err(why) = link.lend_tensors(&hash(), &fields).await {
            assert!(
                why.cause == "nixl_no_room" && since.elapsed() < Duration::from_secs(20),
                "{}",
                why.why
            );
            refused += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(refused > 0 && since.elapsed() > within, "after {:?}", since.elapsed());
    }
}

//! Children that hang, die and lie cost the call that they were given, and no other. The fork server here is a small program that
//! does as it is told; vLLM's own processor is in the tests of `python/chiasm_processor` and of `chiasm`.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_processor::{
    ItemCall, ItemLimits, ItemValue, KnownItem, MadeItem, Processor, ProcessorError, ProcessorOptions, Sandbox,
};
use serde_json::Map;

fn options(fate: &str) -> ProcessorOptions {
    ProcessorOptions {
        python: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fork_server.py"),
        model: "model".into(),
        vllm_flags: vec![fate.to_owned()],
        children: 2,
        queue: 1,
        timeout: Duration::from_millis(500),
        startup_timeout: Duration::from_secs(20),
        item_bytes: 1 << 20,
        address_space: 0,
        limits: ItemLimits::default(),
        sandbox: Sandbox::Auto,
    }
}

async fn start() -> Processor {
    Processor::start(options("serve")).await.unwrap()
}

async fn item(processor: &Processor, order: &str) -> Result<MadeItem, ProcessorError> {
    let (file, none) = (Bytes::copy_from_slice(order.as_bytes()), Map::new());
    processor.item(ItemCall { modality: "image", file, processor_kwargs: &none, io_kwargs: &none }).await
}

/// The process that made an item.
fn maker(made: &MadeItem) -> usize {
    made.updates[0].full[0].1
}

fn is_alive(process: usize) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

async fn ends(process: usize) {
    let begun = Instant::now();
    while is_alive(process) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{process} does not end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_item_is_made_by_a_child_that_is_used_again() {
    let processor = start().await;
    assert_eq!(processor.greeting().limits["video"], Some(2));
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(processor.greeting().vllm, "0 []", "variables that came along");
    let made = item(&processor, "make").await.unwrap();
    let ItemValue::Tensor(tensor) = &made.fields[0].value else { panic!("a tensor") };
    let mut out = [0; 4];
    made.read(tensor, &mut out).unwrap();
    assert_eq!(out, [1, 2, 3, 4]);
    let again = item(&processor, "make again").await.unwrap();
    assert_eq!(maker(&made), maker(&again));
    // What was made stays, whatever is made after it.
    made.read(tensor, &mut out).unwrap();
    let items = [KnownItem { modality: "image", updates: &made.updates }];
    let expanded = processor.prompt(&[1, 2, 3], &items, &Map::new()).await.unwrap();
    assert_eq!((expanded.tokens.len(), expanded.placeholders[0].length), (3, 1));
    drop(processor);
    ends(maker(&made)).await;
}

#[tokio::test]
async fn a_child_that_fails_is_replaced_and_one_that_refuses_is_not() {
    let processor = start().await;
    let mut before = maker(&item(&processor, "make").await.unwrap());
    for (order, expected, goes_on) in [
        ("refuse", "ValueError: no such thing", true),
        ("die", "vLLM's processor broke down over it", false),
        ("lie", "the field 'x' does not fit its shape", false),
        ("babble", "makes no sense", false),
        ("hang", "within 0.5 s", false),
    ] {
        let error = item(&processor, order).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{order}: {error}");
        let after = maker(&item(&processor, "make").await.unwrap());
        assert_eq!(before == after, goes_on, "{order}");
        if !goes_on {
            ends(before).await;
        }
        before = after;
    }
}

#[tokio::test]
async fn calls_wait_for_children_and_only_so_many() {
    let processor = Arc::new(start().await);
    let begun = Instant::now();
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let processor = processor.clone();
            tokio::spawn(async move { item(&processor, "hang").await.unwrap_err() })
        })
        .collect();
    let mut busy = 0;
    for call in calls {
        match call.await.unwrap() {
            ProcessorError::Busy => busy += 1,
            ProcessorError::TimedOut { .. } => {}
            error => panic!("{error}"),
        }
    }
    // Two at once, one that waits for them, and no room for the others.
    assert_eq!(busy, 2);
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    item(&processor, "make").await.unwrap();
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_ends_with_its_child() {
    let processor = start().await;
    let made = item(&processor, "make").await.unwrap();
    let abandoned = tokio::time::timeout(Duration::from_millis(100), item(&processor, "hang")).await;
    assert!(abandoned.is_err());
    ends(maker(&made)).await;
    item(&processor, "make").await.unwrap();
}

#[tokio::test]
async fn what_can_t_be_started_says_why() {
    let error = Processor::start(options("fail")).await.err().unwrap();
    assert!(matches!(&error, ProcessorError::NotServed(why) if why.contains("takes no media")), "{error}");
    let error = Processor::start(options("vanish")).await.err().unwrap();
    assert!(matches!(&error, ProcessorError::Gone(why) if why.contains("the last words")), "{error}");
    let nothing = ProcessorOptions { python: "/no/such/python".into(), ..options("serve") };
    assert!(matches!(Processor::start(nothing).await.err().unwrap(), ProcessorError::NoPython { .. }));
}

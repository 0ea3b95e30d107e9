//! Jobs with LoRA adapters.

use chiasm_backend::{Adapter, AdapterError};
use chiasm_fleet::adapters::{AdapterFiles, AdapterSource, StampSource};

use super::*;
use crate::proto::WatchRequest;
use crate::proto::watch_event::Event;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_with_adapter_is_announced_with_own_block_keys() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("adapter_config.json"), r#"{"r": 8}"#).unwrap();
    let source = AdapterSource { name: "a".to_owned(), path: dir.path().display().to_string() };
    let adapters = Arc::new(Adapters::new(1));
    let files = AdapterFiles::inspect(&source, false, StampSource::Content).unwrap();
    adapters.serve(&source, &files).unwrap();
    let adapter = adapters.get("a").unwrap().engine().clone();
    let engine =
        FakeBackend::with_capabilities(Capabilities { max_loras: 1, ..fake_capabilities() });
    let harness = TestHarness::with_adapters(engine, adapters).await;
    let engine = harness.connect().await;
    assert_eq!(engine.capabilities().adapters[&adapter.name].root, source.path);
    // Another frontend follows the jobs.
    let (mut jobs, _) = harness.link.clients();
    let mut events =
        jobs.watch(WatchRequest { engine: 0, frontend: 9 }).await.unwrap().into_inner();
    let mut keys = Vec::new();
    for adapter in [None, Some(adapter.clone())] {
        let mut job = Job { adapter: adapter.clone(), ..job(&[TokenId(3); 40]) };
        job.sampling.skip_reading_prefix_cache = false;
        let _running = engine.start(Arc::new(job)).await.unwrap();
        harness.wait_for_jobs(keys.len() + 1).await;
        // Engines get the adapter that the agent has loaded, not the frontend's description.
        assert_eq!(harness.engine.jobs().last().unwrap().adapter, adapter);
        keys.push(loop {
            if let Some(Event::OthersJob(job)) = events.message().await.unwrap().unwrap().event {
                break job.block_keys;
            }
        });
    }
    assert!(
        keys[0].len() == 2 * 16 && keys[1].len() == keys[0].len() && keys[0] != keys[1],
        "{keys:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_with_missing_adapter_is_not_taken() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let adapter =
        Adapter { id: std::num::NonZeroU32::MIN, name: "a@1".to_owned(), path: "/a".to_owned() };
    let with_adapter = Job { adapter: Some(Arc::new(adapter.clone())), ..job(&[TokenId(3)]) };
    let parsed = job::from_message(over_the_wire(&with_adapter)).unwrap();
    assert_eq!(parsed.adapter.as_deref(), Some("a@1"));
    let Err(JobError::NotTaken(why)) = delivered(&*engine, &with_adapter).await else {
        panic!("not taken")
    };
    assert!(why.to_string().contains("no LoRA adapter 'a@1'"), "{why}");
    assert!(matches!(engine.load_adapter(&adapter).await, Err(AdapterError::NotPreloaded)));
}

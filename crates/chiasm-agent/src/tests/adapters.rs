//! Jobs with LoRA adapters.

use chiasm_backend::{Adapter, AdapterError};
use chiasm_fleet::adapters::{AdapterFiles, AdapterSource, Stamps};

use super::*;
use crate::proto::WatchRequest;
use crate::proto::watch_event::Event;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_with_an_adapter_has_it_and_is_announced_with_blocks_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("adapter_config.json"), r#"{"r": 8}"#).unwrap();
    let source = AdapterSource { name: "a".to_owned(), path: dir.path().display().to_string() };
    let adapters = Arc::new(Adapters::new(1));
    adapters.serve(&source, &AdapterFiles::look(&source, false, Stamps::Content).unwrap()).unwrap();
    let adapter = adapters.get("a").unwrap().engine().clone();
    let taking = FakeBackend::with(Capabilities { max_loras: 1, ..fake_capabilities() });
    let stand = Stand::of(taking, adapters).await;
    let engine = stand.connect().await;
    assert_eq!(engine.capabilities().adapters[&adapter.name].root, source.path);
    // Another frontend listens.
    let (mut jobs, _) = stand.link.clients();
    let mut heard = jobs.watch(WatchRequest { engine: 0, frontend: 9 }).await.unwrap().into_inner();
    let mut keys = Vec::new();
    for adapter in [None, Some(adapter.clone())] {
        let mut told = Job { adapter: adapter.clone(), ..job(&[TokenId(3); 40]) };
        told.sampling.skip_reading_prefix_cache = false;
        let _running = engine.start(Arc::new(told)).await.unwrap();
        stand.engine_has_jobs(keys.len() + 1).await;
        // Engines are told what the agent has loaded, not what a frontend says of it.
        assert_eq!(stand.engine.jobs().last().unwrap().adapter, adapter);
        keys.push(loop {
            if let Some(Event::OthersJob(told)) = heard.message().await.unwrap().unwrap().event {
                break told.block_keys;
            }
        });
    }
    assert!(
        keys[0].len() == 2 * 16 && keys[1].len() == keys[0].len() && keys[0] != keys[1],
        "{keys:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_adapter_is_gone_is_for_another_engine() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let adapter =
        Adapter { id: std::num::NonZeroU32::MIN, name: "a@1".to_owned(), path: "/a".to_owned() };
    let told = Job { adapter: Some(Arc::new(adapter.clone())), ..job(&[TokenId(3)]) };
    assert_eq!(job::from_message(sent(&told)).unwrap().adapter.as_deref(), Some("a@1"));
    let Err(JobError::NotTaken(why)) = delivered(&*engine, &told).await else {
        panic!("not taken")
    };
    assert!(why.to_string().contains("no LoRA adapter that it knows as 'a@1'"), "{why}");
    assert!(matches!(engine.load_adapter(&adapter).await, Err(AdapterError::NotOwn)));
}

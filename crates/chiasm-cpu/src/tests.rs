use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use chiasm_limit::Owner;
use futures_util::future::{join_all, try_join_all};
use futures_util::poll;

use super::*;

/// A busy thread. Dropping this frees it.
struct BusyThread {
    _release: Sender<()>,
}

fn pool(threads: usize) -> CpuPool {
    CpuPool::new(threads, &CpuMetrics::default())
}

fn ticket(price: Duration) -> Ticket {
    CpuBudget::shared().ticket(price).unwrap()
}

fn budget_of(number: u8) -> CpuBudget {
    CpuBudget::new(Owner::Address(Ipv4Addr::new(192, 0, 2, number)), Duration::MAX)
}

/// Occupies one thread of the lane for this price.
async fn occupy(pool: &CpuPool, price: Duration) -> BusyThread {
    let (release, released) = channel::<()>();
    let (started_sender, started) = oneshot::channel();
    let pool = pool.clone();
    let ticket = ticket(price);
    let job = move || {
        started_sender.send(()).unwrap();
        let _ = released.recv();
    };
    tokio::spawn(async move { pool.run(&ticket, job).await });
    started.await.unwrap();
    BusyThread { _release: release }
}

const USUAL: Duration = Duration::from_millis(50);
const EXPENSIVE: Duration = Duration::from_secs(2);

#[tokio::test]
async fn lane_runs_limited_number_of_jobs() {
    for (price, allowed) in [(MAX_SHORT, 4), (USUAL, 3), (EXPENSIVE, 2)] {
        let pool = pool(3);
        let mut busy = Vec::new();
        for _ in 0..allowed {
            busy.push(occupy(&pool, price).await);
        }
        let ticket = ticket(price);
        let mut more = Box::pin(pool.run(&ticket, || 7));
        assert!(poll!(&mut more).is_pending());
        assert_eq!(pool.lane(price).busy(), allowed);
        busy.pop();
        assert_eq!(more.await.unwrap(), 7);
    }
}

#[tokio::test]
async fn short_work_does_not_wait_for_longer_work() {
    let pool = pool(1);
    let _busy = [occupy(&pool, USUAL).await, occupy(&pool, EXPENSIVE).await];
    assert_eq!(pool.run(&ticket(MAX_SHORT), || 7).await.unwrap(), 7);
}

#[tokio::test]
async fn light_request_overtakes_rest_of_heavy_one() {
    let pool = pool(1);
    let busy = occupy(&pool, USUAL).await;
    let done = Arc::new(Mutex::new(Vec::new()));
    let job = |name: &'static str, budget: &CpuBudget| {
        let pool = pool.clone();
        let ticket = budget.ticket(USUAL).unwrap();
        let done = done.clone();
        async move { pool.run(&ticket, move || done.lock().unwrap().push(name)).await.unwrap() }
    };
    let greedy = budget_of(1);
    let modest = budget_of(1);
    // Polled in this order, so queued in this order.
    let all = join_all([
        job("first", &greedy),
        job("second", &greedy),
        job("third", &greedy),
        job("other", &modest),
    ]);
    let mut all = Box::pin(all);
    assert!(poll!(&mut all).is_pending());
    drop(busy);
    all.await;
    assert_eq!(*done.lock().unwrap(), ["first", "other", "second", "third"]);

    // The same if each piece is a separate request, three of them by one owner.
    let busy = occupy(&pool, USUAL).await;
    let requests = [budget_of(1), budget_of(1), budget_of(1), budget_of(2)];
    let names = ["first", "second", "third", "other"];
    let mut all =
        Box::pin(join_all(names.iter().zip(&requests).map(|(name, budget)| job(name, budget))));
    assert!(poll!(&mut all).is_pending());
    done.lock().unwrap().clear();
    drop(busy);
    all.await;
    assert_eq!(*done.lock().unwrap(), ["first", "other", "second", "third"]);
}

#[tokio::test]
async fn abandoned_work_does_not_begin() {
    let metrics = CpuMetrics::default();
    let pool = CpuPool::new(1, &metrics);
    let busy = occupy(&pool, USUAL).await;
    let used = Arc::new(());
    let unused = ticket(USUAL);
    let job = {
        let used = used.clone();
        move || drop(used)
    };
    let mut waiting = Box::pin(pool.run(&unused, job));
    assert!(poll!(&mut waiting).is_pending());
    assert_eq!(metrics.lane("usual").waiting.get(), 1);
    drop(waiting);
    // The job and its captures are dropped while the thread is still busy.
    assert_eq!((Arc::strong_count(&used), metrics.lane("usual").waiting.get()), (1, 0));
    drop(busy);
}

#[tokio::test]
async fn panicking_job_keeps_its_thread() {
    let pool = pool(1);
    let budget = budget_of(1);
    for is_small in [true, false] {
        let error = pool
            .run_inline_if::<()>(is_small, &budget, USUAL, || panic!("on purpose"))
            .await
            .unwrap_err();
        assert!(matches!(error, CpuError::Failed));
        assert_eq!(pool.run(&ticket(USUAL), || 7).await.unwrap(), 7);
    }
}

#[tokio::test]
async fn too_costly_work_does_not_begin() {
    let pool = pool(1);
    let budget = CpuBudget::new(Owner::Address(Ipv4Addr::LOCALHOST), EXPENSIVE);
    let error = pool
        .run_inline_if(false, &budget, 2 * EXPENSIVE, || unreachable!("not begun"))
        .await
        .unwrap_err();
    assert!(matches!(error, CpuError::TooCostly { .. }));
    // Inline work is free.
    pool.run_inline_if(true, &budget, 2 * EXPENSIVE, || ()).await.unwrap();
}

#[tokio::test]
async fn work_far_over_its_price_exhausts_budget() {
    let pool = pool(1);
    let limit = Duration::from_millis(2);
    let budget = CpuBudget::new(Owner::Address(Ipv4Addr::LOCALHOST), limit);
    let [slow, waiting] = [(); 2].map(|()| budget.ticket(Duration::from_micros(1)).unwrap());
    let work = move || {
        let started = thread_time();
        while thread_time() - started < limit {}
    };
    pool.run(&slow, work).await.unwrap();
    let error = pool.run(&waiting, || unreachable!("not begun")).await.unwrap_err();
    assert!(matches!(error, CpuError::TooCostly { .. }));
    assert_eq!(pool.run(&ticket(USUAL), || 7).await.unwrap(), 7);
}

#[tokio::test]
async fn threads_end_with_pool() {
    let pool = pool(2);
    try_join_all((0..8).map(|_| async { pool.run(&ticket(USUAL), || ()).await })).await.unwrap();
    let lane = Arc::downgrade(pool.lane(USUAL));
    drop(pool);
    // Each thread holds the lane.
    while lane.upgrade().is_some() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn idle_thread_ends_before_another_starts_on_demand() {
    let lane = Arc::new(Lane::new("usual", 1, 0, Duration::ZERO, &CpuMetrics::default()));
    for _ in 0..3 {
        let (sender, receiver) = oneshot::channel();
        let _queued =
            lane.push(None, USUAL, Instant::now(), Box::new(move || sender.send(7).unwrap()));
        assert_eq!(receiver.await.unwrap(), 7);
        while lane.threads() > 0 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn load_counts_waiting_plus_running_work() {
    let pool = pool(1);
    let load = || pool.load().pending;
    assert_eq!((load(), pool.load().threads, pool.is_free(USUAL)), ([Duration::ZERO; 3], 1, true));
    let busy = occupy(&pool, USUAL).await;
    assert_eq!(
        (load(), pool.is_free(USUAL), pool.is_free(MAX_SHORT)),
        ([Duration::ZERO, USUAL, Duration::ZERO], false, true)
    );
    let ticket = ticket(USUAL);
    let mut more = Box::pin(pool.run(&ticket, || 7));
    assert!(poll!(&mut more).is_pending());
    assert_eq!(load()[1], 2 * USUAL);
    // An abandoned job does not count.
    drop(more);
    assert_eq!(load()[1], USUAL);
    drop(busy);
    while load()[1] > Duration::ZERO || !pool.is_free(USUAL) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn large_image_shares_idle_threads() {
    assert!(pool(1).shared(MIN_SHARED_PIXELS).is_none());
    let pool = pool(4);
    assert!(pool.shared(MIN_SHARED_PIXELS - 1).is_none());
    let _busy = [occupy(&pool, USUAL).await, occupy(&pool, EXPENSIVE).await];
    assert_eq!(pool.shared(MIN_SHARED_PIXELS).map(ThreadPool::current_num_threads), Some(4));
    let _busier = occupy(&pool, USUAL).await;
    assert!(pool.shared(MIN_SHARED_PIXELS).is_none());
}

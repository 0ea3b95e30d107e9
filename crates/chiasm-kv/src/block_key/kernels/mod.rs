//! Vector code that computes the keys of many blocks at a time, and the choice of the
//! implementation.
//!
//! [`Secret::extend_each`] is the scalar reference. Every implementation must equal it bit for bit.
//!
//! | module | requires |
//! |---|---|
//! | `avx512` | x86-64 with AVX-512 F and IFMA: Intel since Ice Lake, AMD since Zen 4 |
//!
//! [`Secret::extend_each`]: super::universal::Secret::extend_each

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::sync::LazyLock;

use chiasm_types::TokenId;

use super::BlockKey;
use super::field::multiply_add;

/// The maximum number of words of tokens per block that kernels accept.
pub(super) const MAX_BLOCK_WORDS: usize = 64;

/// Consecutive blocks that differ only in their tokens, and in one summand that grows linearly from
/// block to block.
#[derive(Clone, Copy)]
pub(super) struct Series<'a> {
    /// The state before the first block, below p.
    pub(super) state: u128,
    /// The share of the first block's sum that all words except its tokens have, below p.
    pub(super) extra_sum: u128,
    /// The growth of that share from each block to the next, below p.
    pub(super) extra_step: u128,
    /// The tokens of the blocks; full blocks only.
    pub(super) tokens: &'a [TokenId],
    /// The number of tokens per block, from 1 to twice [`MAX_BLOCK_WORDS`].
    pub(super) block_size: usize,
}

impl Series<'_> {
    /// Removes the leading blocks, whose keys are `keys`.
    pub(super) fn skip(&mut self, keys: &[BlockKey]) {
        let Some(last) = keys.last() else { return };
        self.state = last.0;
        self.extra_sum = multiply_add(self.extra_step, keys.len() as u128, self.extra_sum);
        self.tokens = &self.tokens[keys.len() * self.block_size..];
    }
}

/// An implementation that this CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    #[cfg(test)]
    pub(super) name: &'static str,
    /// May need CPU features. Only [`supported`] creates kernels, after it has detected the
    /// features.
    extend: unsafe fn(&Tables, &Series<'_>, &mut Vec<BlockKey>),
}

impl Kernel {
    /// Appends the keys of the leading blocks. Stops at a block with larger tokens than the
    /// implementation accepts, or a few blocks earlier.
    pub(super) fn extend(self, tables: &Tables, series: &Series<'_>, keys: &mut Vec<BlockKey>) {
        // SAFETY: kernels are only created where the CPU has their features.
        unsafe { (self.extend)(tables, series, keys) }
    }

    /// Returns the fastest kernel that this CPU supports.
    pub(super) fn fastest() -> Option<Self> {
        SUPPORTED.last().copied()
    }
}

/// The secret in the forms that the implementations need.
pub(super) struct Tables {
    #[cfg(target_arch = "x86_64")]
    avx512: avx512::Table,
}

impl Tables {
    /// Prepares the tables from the coefficients of the first words of tokens and the point, which
    /// is not 0. All numbers are below p.
    #[allow(unused_variables, reason = "where there is no vector code")]
    pub(super) fn new(coefficients: &[u128; MAX_BLOCK_WORDS], point: u128) -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            avx512: avx512::Table::new(coefficients, point),
        }
    }
}

static SUPPORTED: LazyLock<Vec<Kernel>> = LazyLock::new(supported);

/// Returns the kernels that this CPU can run, the fastest last.
pub(super) fn supported() -> Vec<Kernel> {
    #[allow(unused_mut, reason = "on other architectures nothing is added")]
    let mut supported = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512ifma") {
            supported.push(Kernel {
                #[cfg(test)]
                name: "avx512",
                extend: avx512::extend,
            });
        }
    }
    supported
}

#[cfg(test)]
mod tests;

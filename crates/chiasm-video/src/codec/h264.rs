//! H.264: the parameter sets and the headers of NAL units (ITU-T H.264, clauses 7.3 and D.1).

use super::bits::{self, Bits};
use super::nal::{self, ParameterSets};
use super::picture::{Picture, RandomAccess, StreamHeader};
use crate::error::IndexError;

const NAL_IDR_SLICE: u8 = 5;
const NAL_SEI: u8 = 6;
const NAL_SPS: u8 = 7;
const NAL_PPS: u8 = 8;
const NAL_END_OF_SEQUENCE: u8 = 10;
const NAL_END_OF_STREAM: u8 = 11;
const NAL_SPS_EXTENSION: u8 = 13;
const NAL_SUBSET_SPS: u8 = 15;

/// The SEI payload type of a recovery point.
const SEI_RECOVERY_POINT: usize = 6;

/// Reads the parameter sets of an `avcC`.
pub(super) fn read_config(config: &[u8]) -> Option<(usize, ParameterSets<'_>)> {
    let length_size = usize::from(config.get(4)? & 3) + 1;
    let mut sets = ParameterSets::default();
    let mut at = 6;
    for _ in 0..config.get(5)? & 31 {
        at = sets.push_prefixed(config, at)?;
    }
    let pictures = *config.get(at)?;
    at += 1;
    for _ in 0..pictures {
        at = sets.push_prefixed(config, at)?;
    }
    Some((length_size, sets))
}

/// Reads the size of the pictures from a sequence parameter set.
pub(super) fn read_sps(nal: &[u8]) -> Result<StreamHeader, IndexError> {
    let sps = parse_sps(nal).ok_or(IndexError::CodecHeader)?;
    if sps.is_interlaced {
        return Err(IndexError::Interlaced);
    }
    let width = i64::from(sps.width_mbs) * 16 - i64::from(sps.crop_x);
    let height = i64::from(sps.height_mbs) * 16 - i64::from(sps.crop_y);
    StreamHeader::new(width, height)
}

struct Sps {
    width_mbs: u32,
    height_mbs: u32,
    is_interlaced: bool,
    crop_x: u32,
    crop_y: u32,
}

/// The largest side in macroblocks that libavcodec accepts, rounded up.
const MAX_SIDE_MBS: u32 = 1 << 11;

fn parse_sps(nal: &[u8]) -> Option<Sps> {
    let mut bits = Bits::new(nal, 1);
    let profile = bits.bits(8)?;
    bits.skip(16);
    bits.ue()?;
    let mut chroma = 1;
    if [100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135].contains(&profile) {
        chroma = bits.ue()?;
        if chroma == 3 && bits.flag()? {
            return None;
        }
        bits.ue()?;
        bits.ue()?;
        bits.flag()?;
        if bits.flag()? {
            for list in 0..if chroma == 3 { 12 } else { 8 } {
                if bits.flag()? {
                    skip_scaling_list(&mut bits, if list < 6 { 16 } else { 64 })?;
                }
            }
        }
    }
    bits.ue()?;
    match bits.ue()? {
        0 => {
            bits.ue()?;
        }
        1 => {
            bits.flag()?;
            bits.se()?;
            bits.se()?;
            let cycle = bits.ue()?;
            if cycle > 255 {
                return None;
            }
            for _ in 0..cycle {
                bits.se()?;
            }
        }
        _ => {}
    }
    bits.ue()?;
    bits.flag()?;
    let width_mbs = bits.ue()?.checked_add(1)?;
    let height_units = bits.ue()?.checked_add(1)?;
    let is_interlaced = !bits.flag()?;
    if is_interlaced {
        bits.flag()?;
    }
    if width_mbs > MAX_SIDE_MBS || height_units > MAX_SIDE_MBS {
        return None;
    }
    bits.flag()?;
    let mut crop_x = 0;
    let mut crop_y = 0;
    if bits.flag()? {
        let sides = [bits.ue()?, bits.ue()?, bits.ue()?, bits.ue()?];
        let unit_x = if chroma == 1 || chroma == 2 { 2 } else { 1 };
        let unit_y = if chroma == 1 { 2 } else { 1 };
        crop_x = sides[0].checked_add(sides[1])?.checked_mul(unit_x)?;
        crop_y = sides[2].checked_add(sides[3])?.checked_mul(unit_y)?;
    }
    Some(Sps { width_mbs, height_mbs: height_units, is_interlaced, crop_x, crop_y })
}

fn skip_scaling_list(bits: &mut Bits, size: u32) -> Option<()> {
    let mut last = 8i64;
    let mut next = 8i64;
    for _ in 0..size {
        if next != 0 {
            next = (last + bits.se()?).rem_euclid(256);
        }
        if next != 0 {
            last = next;
        }
    }
    Some(())
}

/// Returns `true` for NAL units that are parameter sets.
fn is_parameter_set(kind: u8) -> bool {
    matches!(kind, NAL_SPS | NAL_PPS | NAL_SPS_EXTENSION | NAL_SUBSET_SPS)
}

/// Reads the headers of a sample's NAL units.
pub(super) fn read_sample(
    sample: &[u8],
    length_size: usize,
    finds_b_slices: bool,
    expected: StreamHeader,
    sets: &mut nal::InBandSets<'_>,
) -> Result<Picture, IndexError> {
    let mut pictures = 0;
    let mut is_droppable = true;
    let mut is_idr = true;
    let mut has_b_slice = false;
    let mut is_exact_recovery = false;
    let mut ends_sequence = false;
    for nal in nal::units(sample, length_size) {
        let nal = nal?;
        ends_sequence |= nal
            .first()
            .is_some_and(|header| matches!(header & 31, NAL_END_OF_SEQUENCE | NAL_END_OF_STREAM));
        let &[header, second, ..] = nal else {
            continue;
        };
        match header & 31 {
            kind @ 1..=NAL_IDR_SLICE => {
                pictures += usize::from(second & 0x80 != 0);
                is_droppable &= header & 0x60 == 0;
                is_idr &= kind == NAL_IDR_SLICE;
                has_b_slice |= finds_b_slices && is_b_slice(nal);
            }
            NAL_SEI => is_exact_recovery |= has_exact_recovery_point(nal),
            kind if is_parameter_set(kind) => {
                let is_new = sets.add(nal);
                if is_new && kind == NAL_SPS && read_sps(nal)? != expected {
                    return Err(IndexError::CodecHeader);
                }
            }
            _ => {}
        }
    }
    if pictures != 1 {
        return Err(IndexError::Pictures);
    }
    let start = if is_idr {
        RandomAccess::Closed
    } else if is_exact_recovery {
        RandomAccess::Open
    } else {
        RandomAccess::No
    };
    Ok(Picture { start, is_droppable, has_b_slice, ends_sequence })
}

/// Returns `true` if a slice may refer to two pictures at once. Reads the first two numbers of the
/// slice header.
fn is_b_slice(nal: &[u8]) -> bool {
    let mut bits = Bits::new(&nal[..nal.len().min(12)], 1);
    let kind = bits.ue().and_then(|_| bits.ue());
    matches!(kind, Some(1 | 6))
}

/// Returns `true` for a recovery point at which decoding is exact at once.
fn has_exact_recovery_point(nal: &[u8]) -> bool {
    let payload = bits::payload(nal, 1);
    let mut at = 0;
    let number = |at: &mut usize| {
        let mut value = 0usize;
        loop {
            let byte = *payload.get(*at)?;
            *at += 1;
            value = value.saturating_add(byte.into());
            if byte != 255 {
                return Some(value);
            }
        }
    };
    while at + 2 < payload.len() {
        let (Some(kind), Some(size)) = (number(&mut at), number(&mut at)) else { return false };
        if kind == SEI_RECOVERY_POINT {
            // recovery_frame_cnt 0 is the bit 1, exact_match_flag the bit behind.
            return payload.get(at).is_some_and(|byte| byte & 0xc0 == 0xc0);
        }
        at = at.saturating_add(size);
    }
    false
}

/// Returns the first sequence parameter set of a sample.
pub(super) fn find_sps(sample: &[u8], length_size: usize) -> Option<&[u8]> {
    nal::units(sample, length_size)
        .map_while(Result::ok)
        .find(|nal| nal.first().is_some_and(|header| header & 31 == NAL_SPS))
}

/// Returns the sequence parameter set of a configuration.
pub(super) fn first_sps<'a>(sets: &ParameterSets<'a>) -> Option<&'a [u8]> {
    sets.find(|header| header & 31 == NAL_SPS)
}

/// Checks that all sequence parameter sets of a configuration state the same size.
pub(super) fn check_sps(
    sets: &ParameterSets<'_>,
    expected: StreamHeader,
) -> Result<(), IndexError> {
    let mut all = sets.all(|unit| unit[0] & 31 == NAL_SPS);
    if all.all(|nal| read_sps(nal) == Ok(expected)) { Ok(()) } else { Err(IndexError::CodecHeader) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_point_behind_escaped_bytes_is_found() {
        // Four bytes of user data, of which the third would be a start code's without an escape.
        let behind = [NAL_SEI, 5, 4, 0, 0, 3, 1, 9, 6, 1, 0xc4, 0x80];
        assert!(has_exact_recovery_point(&behind));
        let inexact = [NAL_SEI, 5, 4, 0, 0, 3, 1, 9, 6, 1, 0x44, 0x80];
        assert!(!has_exact_recovery_point(&inexact));
    }

    #[test]
    fn in_band_set_with_another_size_is_refused() {
        // 16 and 32 columns.
        let narrow = [0x67, 66, 0, 10, 0xdd, 0xe0];
        let wide = [0x67, 66, 0, 10, 0xdc, 0xb8];
        let expected = read_sps(&narrow).unwrap();
        let read = |set: &[u8]| {
            let sample = [&[6], set, &[2, 0x65, 0x80]].concat();
            let config = ParameterSets::default();
            let mut sets = nal::InBandSets::new(&config);
            read_sample(&sample, 1, false, expected, &mut sets).map(|picture| picture.start)
        };
        assert_eq!(read(&narrow), Ok(RandomAccess::Closed));
        assert_eq!(read(&wide), Err(IndexError::CodecHeader));
    }
}

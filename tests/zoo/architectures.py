"""Tiny random models of real architectures, which keep each one's quirks: ``build("llama")`` gives (model, args, kwargs).

Entries of :data:`REG` are name -> (family, builder); families are decoder, encoder, encdec, diffusion and plain.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("DIFFUSERS_OFFLINE", "1")
import inspect
import warnings

import torch

warnings.filterwarnings("ignore")

REG = {}
B, S = 2, 12

BASE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    sliding_window=8,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    use_cache=False,
    tie_word_embeddings=False,
)


def _fields(cls):
    names = set()
    for c in cls.__mro__:
        names |= set(getattr(c, "__annotations__", {}))
    try:
        names |= set(inspect.signature(cls.__init__).parameters)
    except Exception:
        pass
    names |= set(getattr(cls, "attribute_map", {}) or {})
    return names


def mkcfg(cfgname, drop=(), **over):
    import transformers

    cls = getattr(transformers, cfgname)
    f = _fields(cls)
    kw = {k: v for k, v in BASE.items() if k in f and k not in drop}
    kw.update(over)
    return cls(**kw)


def _fin(m):
    m.eval()
    for p in m.parameters():
        p.requires_grad_(False)
    return m


def ids(b=B, s=S, v=128):
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, v, (b, s), generator=g)


def reg(name, family):
    def deco(fn):
        REG[name] = (family, fn)
        return fn

    return deco


def dec(name, cfgname, clsname=None, drop=(), attn="sdpa", with_mask=False, **over):
    def fn():
        import transformers

        torch.manual_seed(0)
        cfg = mkcfg(cfgname, drop=drop, **over)
        kw = dict(attn_implementation=attn) if attn else {}
        if clsname:
            cls = getattr(transformers, clsname)
            m = cls._from_config(cfg, **kw)
        else:
            m = transformers.AutoModelForCausalLM.from_config(cfg, **kw)
        kwargs = dict(input_ids=ids(), use_cache=False)
        if with_mask:
            am = torch.ones(B, S, dtype=torch.long)
            am[0, :3] = 0
            kwargs["attention_mask"] = am
        return _fin(m), (), kwargs

    REG[name] = ("decoder", fn)


# ---------------------------------------------------------------- decoder LMs
dec("llama", "LlamaConfig")
dec("llama_padmask", "LlamaConfig", with_mask=True)
dec("llama_bias", "LlamaConfig", attention_bias=True, mlp_bias=True)
dec("llama_tied", "LlamaConfig", tie_word_embeddings=True)
dec(
    "llama3_rope",
    "LlamaConfig",
    rope_parameters=dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
)
dec("llama_eager", "LlamaConfig", attn="eager")
dec("llama_flex", "LlamaConfig", attn="flex_attention")
dec("mistral", "MistralConfig")
dec("mistral_nosw", "MistralConfig", sliding_window=None)
dec("qwen2", "Qwen2Config")
dec("qwen3", "Qwen3Config")
dec("qwen3_moe", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
dec(
    "qwen3_next",
    "Qwen3NextConfig",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)
dec("mixtral", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2)
dec("gemma", "GemmaConfig")
dec("gemma2_eager", "Gemma2Config", attn="eager")
dec("gemma3_text", "Gemma3TextConfig", layer_types=["sliding_attention", "full_attention"])
dec(
    "gemma3n_text",
    "Gemma3nTextConfig",
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=128,
    laurel_rank=8,
    altup_num_inputs=2,
    activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
    intermediate_size=128,
)
dec(
    "gemma4_text",
    "Gemma4TextConfig",
    clsname="Gemma4ForCausalLM",
    num_hidden_layers=4,
    num_kv_shared_layers=0,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=128,
    global_head_dim=32,
)
dec("phi", "PhiConfig", partial_rotary_factor=0.5)
dec("phi3", "Phi3Config")
dec("olmo", "OlmoConfig", clip_qkv=8.0)
dec("olmo2", "Olmo2Config")
dec("granite", "GraniteConfig", attention_multiplier=0.015625, residual_multiplier=0.22)
dec("granitemoe", "GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2)
dec("cohere", "CohereConfig", use_qk_norm=True)
dec("falcon_7b", "FalconConfig", multi_query=True, new_decoder_architecture=False)
dec("falcon_40b", "FalconConfig", new_decoder_architecture=True, num_kv_heads=2)
dec("gpt_neox", "GPTNeoXConfig", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))
dec(
    "gpt2",
    "GPT2Config",
    n_embd=64,
    n_head=4,
    n_layer=2,
    n_positions=64,
    drop=("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"),
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
)
dec(
    "gptj_eager",
    "GPTJConfig",
    attn=None,
    n_embd=64,
    n_head=4,
    n_layer=2,
    n_positions=64,
    rotary_dim=8,
    drop=("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"),
)
dec(
    "gpt_neo",
    "GPTNeoConfig",
    attn=None,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    drop=("num_hidden_layers", "num_attention_heads"),
    window_size=8,
)
dec("bloom", "BloomConfig", attn=None, n_head=4, n_layer=2, drop=("num_attention_heads", "num_hidden_layers"))
dec(
    "mpt",
    "MptConfig",
    attn=None,
    d_model=64,
    n_heads=4,
    n_layers=2,
    max_seq_len=64,
    drop=("hidden_size", "num_attention_heads", "num_hidden_layers"),
)
dec("stablelm", "StableLmConfig", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25))
dec("starcoder2", "Starcoder2Config")
dec("glm", "GlmConfig", partial_rotary_factor=0.5)
dec("glm4", "Glm4Config", partial_rotary_factor=0.5)
dec(
    "deepseek_v2",
    "DeepseekV2Config",
    drop=("head_dim", "num_key_value_heads"),
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
dec(
    "deepseek_v3",
    "DeepseekV3Config",
    drop=("head_dim", "num_key_value_heads"),
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
dec("smollm3", "SmolLM3Config", no_rope_layers=[1, 0])
dec(
    "gpt_oss",
    "GptOssConfig",
    num_local_experts=4,
    num_experts_per_tok=2,
    attn="eager",
    layer_types=["sliding_attention", "full_attention"],
)
dec("nemotron", "NemotronConfig")
dec("persimmon", "PersimmonConfig")
dec("exaone4", "Exaone4Config", layer_types=["sliding_attention", "full_attention"])
dec("ernie4_5", "Ernie4_5Config")
dec("lfm2", "Lfm2Config", layer_types=["conv", "full_attention"])
dec(
    "jamba",
    "JambaConfig",
    num_experts=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    use_mamba_kernels=False,
    use_associative_scan=False,
    mamba_d_state=8,
    mamba_dt_rank=4,
)
dec(
    "llama4_text",
    "Llama4TextConfig",
    clsname="Llama4ForCausalLM",
    intermediate_size_mlp=128,
    num_local_experts=2,
    interleave_moe_layer_step=2,
    no_rope_layers=[1, 0],
    attention_chunk_size=8,
    layer_types=["chunked_attention", "full_attention"],
)
dec(
    "dbrx",
    "DbrxConfig",
    attn=None,
    d_model=64,
    n_heads=4,
    n_layers=2,
    max_seq_len=64,
    drop=("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings"),
    attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
    ffn_config=dict(ffn_hidden_size=128, moe_num_experts=4, moe_top_k=2, hidden_size=64),
)
dec("helium", "HeliumConfig")
dec("hunyuan_dense", "HunYuanDenseV1Config")
dec("diffllama", "DiffLlamaConfig")
dec("bitnet", "BitNetConfig")
dec("cwm", "CwmConfig", layer_types=["sliding_attention", "full_attention"])
dec(
    "modernbert_decoder",
    "ModernBertDecoderConfig",
    layer_types=["sliding_attention", "full_attention"],
    local_attention=8,
)
# odd dims: real-ish shapes with non power of two head_dim / intermediate (72, 80, 96, 40; 4864-like)
dec(
    "llama_hd80",
    "LlamaConfig",
    hidden_size=160,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=80,
    intermediate_size=176,
)


# ---------------------------------------------------------------- encoders / enc-dec
def enc(name, cfgname, clsname, inputs, drop=(), attn="sdpa", family="encoder", **over):
    def fn():
        import transformers

        torch.manual_seed(0)
        cfg = mkcfg(cfgname, drop=drop, **over)
        cls = getattr(transformers, clsname)
        kw = dict(attn_implementation=attn) if attn else {}
        m = cls._from_config(cfg, **kw)
        return _fin(m), (), inputs()

    REG[name] = (family, fn)


def px():
    return dict(pixel_values=torch.randn(2, 3, 32, 32))


enc("bert", "BertConfig", "BertModel", lambda: dict(input_ids=ids(), attention_mask=torch.ones(B, S, dtype=torch.long)))
enc(
    "modernbert",
    "ModernBertConfig",
    "ModernBertModel",
    lambda: dict(input_ids=ids(), attention_mask=torch.ones(B, S, dtype=torch.long)),
    layer_types=["sliding_attention", "full_attention"],
    local_attention=8,
    cls_token_id=1,
    sep_token_id=2,
)
enc("vit", "ViTConfig", "ViTModel", px, image_size=32, patch_size=8)
enc("dinov2", "Dinov2Config", "Dinov2Model", px, image_size=32, patch_size=8, use_swiglu_ffn=True)
enc(
    "siglip_vision",
    "SiglipVisionConfig",
    "SiglipVisionModel",
    px,
    image_size=32,
    patch_size=8,
    hidden_size=144,
    num_attention_heads=2,
)
enc("clip_vision", "CLIPVisionConfig", "CLIPVisionModel", px, image_size=32, patch_size=8)
enc("clip_text", "CLIPTextConfig", "CLIPTextModel", lambda: dict(input_ids=ids()))
enc(
    "qwen2_5_vl_vision",
    "Qwen2_5_VLVisionConfig",
    "Qwen2_5_VisionTransformerPretrainedModel",
    lambda: dict(hidden_states=torch.randn(64, 3 * 2 * 14 * 14), grid_thw=torch.tensor([[1, 8, 8]])),
    depth=2,
    num_heads=4,
    out_hidden_size=64,
    fullatt_block_indexes=[1],
    window_size=56,
)
enc(
    "t5_encdec",
    "T5Config",
    "T5ForConditionalGeneration",
    lambda: dict(input_ids=ids(), decoder_input_ids=ids(), use_cache=False),
    drop=("num_hidden_layers", "hidden_size", "num_attention_heads"),
    attn=None,
    family="encdec",
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    feed_forward_proj="gated-gelu",
    dropout_rate=0.0,
)
enc(
    "whisper",
    "WhisperConfig",
    "WhisperForConditionalGeneration",
    lambda: dict(input_features=torch.randn(2, 16, 32), decoder_input_ids=ids(), use_cache=False),
    drop=("num_hidden_layers", "hidden_size", "num_attention_heads"),
    family="encdec",
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    num_mel_bins=16,
    max_source_positions=16,
    max_target_positions=32,
    decoder_start_token_id=1,
)


# ---------------------------------------------------------------- diffusers
def dif(name):
    def deco(fn):
        def g():
            torch.manual_seed(0)
            m, a, k = fn()
            return _fin(m), a, k

        REG[name] = ("diffusion", g)
        return fn

    return deco


@dif("flux")
def _():
    from diffusers import FluxTransformer2DModel as M

    m = M(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    n, t = 16, 8
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, n, 4),
            encoder_hidden_states=torch.randn(1, t, 32),
            pooled_projections=torch.randn(1, 32),
            timestep=torch.tensor([1.0]),
            img_ids=torch.rand(n, 3),
            txt_ids=torch.zeros(t, 3),
            guidance=torch.tensor([3.5]),
            return_dict=False,
        ),
    )


def _():
    from diffusers import Flux2Transformer2DModel as M

    m = M(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    n, t = 16, 8
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, n, 4),
            encoder_hidden_states=torch.randn(1, t, 32),
            timestep=torch.tensor([1.0]),
            img_ids=torch.rand(n, 4),
            txt_ids=torch.zeros(t, 4),
            guidance=torch.tensor([3.5]),
            return_dict=False,
        ),
    )


@dif("sd3")
def _():
    from diffusers import SD3Transformer2DModel as M

    m = M(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 8, 8),
            encoder_hidden_states=torch.randn(1, 8, 32),
            pooled_projections=torch.randn(1, 32),
            timestep=torch.tensor([1.0]),
            return_dict=False,
        ),
    )


@dif("unet2d_cond")
def _():
    from diffusers import UNet2DConditionModel as M

    m = M(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    return (
        m,
        (),
        dict(
            sample=torch.randn(1, 4, 8, 8),
            timestep=torch.tensor([1.0]),
            encoder_hidden_states=torch.randn(1, 8, 32),
            return_dict=False,
        ),
    )


@dif("pixart")
def _():
    from diffusers import PixArtTransformer2DModel as M

    m = M(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=8,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 8, 8),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.tensor([1.0]),
            return_dict=False,
        ),
    )


def _():
    from diffusers import HunyuanVideoTransformer3DModel as M

    m = M(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 4, 8),
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 2, 4, 4),
            timestep=torch.tensor([1.0]),
            encoder_hidden_states=torch.randn(1, 8, 32),
            encoder_attention_mask=torch.ones(1, 8),
            pooled_projections=torch.randn(1, 32),
            guidance=torch.tensor([3.5]),
            return_dict=False,
        ),
    )


@dif("wan")
def _():
    from diffusers import WanTransformer3DModel as M

    m = M(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 2, 4, 4),
            timestep=torch.tensor([1]),
            encoder_hidden_states=torch.randn(1, 8, 32),
            return_dict=False,
        ),
    )


@dif("cogvideox")
def _():
    from diffusers import CogVideoXTransformer3DModel as M

    m = M(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )
    n = 2 * 4 * 4
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 2, 4, 8, 8),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.tensor([1]),
            image_rotary_emb=(torch.randn(n, 16), torch.randn(n, 16)),
            return_dict=False,
        ),
    )


def _():
    from diffusers import LTXVideoTransformer3DModel as M

    m = M(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 2 * 4 * 4, 4),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.tensor([1]),
            encoder_attention_mask=torch.ones(1, 8),
            num_frames=2,
            height=4,
            width=4,
            return_dict=False,
        ),
    )


def _():
    from diffusers import MochiTransformer3DModel as M

    m = M(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        out_channels=4,
        qk_norm="rms_norm",
        text_embed_dim=32,
        time_embed_dim=8,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 2, 8, 8),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.tensor([1]),
            encoder_attention_mask=torch.ones(1, 8, dtype=torch.bool),
            return_dict=False,
        ),
    )


@dif("lumina2")
def _():
    from diffusers import Lumina2Transformer2DModel as M

    m = M(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(16, 16, 16),
        cap_feat_dim=32,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 8, 8),
            timestep=torch.tensor([1.0]),
            encoder_hidden_states=torch.randn(1, 8, 32),
            encoder_attention_mask=torch.ones(1, 8, dtype=torch.bool),
            return_dict=False,
        ),
    )


def _():
    from diffusers import AuraFlowTransformer2DModel as M

    m = M(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=64,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 8, 8),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.tensor([1.0]),
            return_dict=False,
        ),
    )


def _():
    from diffusers import QwenImageTransformer2DModel as M

    m = M(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 16, 16),
            encoder_hidden_states=torch.randn(1, 8, 32),
            encoder_hidden_states_mask=torch.ones(1, 8, dtype=torch.long),
            timestep=torch.tensor([1.0]),
            img_shapes=[(1, 4, 4)],
            return_dict=False,
        ),
    )


@dif("sana")
def _():
    from diffusers import SanaTransformer2DModel as M

    m = M(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=8,
        patch_size=1,
    )
    return (
        m,
        (),
        dict(
            hidden_states=torch.randn(1, 4, 8, 8),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.tensor([1.0]),
            return_dict=False,
        ),
    )


@dif("z_image")
def _():
    from diffusers import ZImageTransformer2DModel as M

    m = M(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 12, 12],
        axes_lens=[64, 64, 64],
    )
    return (
        m,
        (),
        dict(x=[torch.randn(4, 1, 8, 8)], t=torch.tensor([0.5]), cap_feats=[torch.randn(8, 32)], return_dict=False),
    )


# ---------------------------------------------------------------- plain torch
@reg("gptfast", "plain")
def _gptfast():
    """gpt-fast / torchtune / executorch style: fused wqkv, complex-free interleaved rope, [B,S,H,D], static kv cache buffer."""
    import torch.nn as nn
    import torch.nn.functional as F

    class Attn(nn.Module):
        def __init__(s, d=64, h=4, kv=2, hd=16):
            super().__init__()
            s.h, s.kv, s.hd = h, kv, hd
            s.wqkv = nn.Linear(d, (h + 2 * kv) * hd, bias=False)
            s.wo = nn.Linear(h * hd, d, bias=False)
            s.register_buffer("k_cache", torch.zeros(2, kv, 32, hd))
            s.register_buffer("v_cache", torch.zeros(2, kv, 32, hd))

        def forward(s, x, fc, pos, mask):
            b, n, _ = x.shape
            q, k, v = s.wqkv(x).split([s.h * s.hd, s.kv * s.hd, s.kv * s.hd], dim=-1)
            q = q.view(b, n, s.h, s.hd)
            k = k.view(b, n, s.kv, s.hd)
            v = v.view(b, n, s.kv, s.hd)

            def rope(x):
                xs = x.float().reshape(*x.shape[:-1], -1, 2)
                f = fc.view(1, n, 1, -1, 2)
                return (
                    torch.stack(
                        [
                            xs[..., 0] * f[..., 0] - xs[..., 1] * f[..., 1],
                            xs[..., 1] * f[..., 0] + xs[..., 0] * f[..., 1],
                        ],
                        -1,
                    )
                    .flatten(3)
                    .type_as(x)
                )

            q, k = rope(q), rope(k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            s.k_cache[:, :, pos] = k
            s.v_cache[:, :, pos] = v
            k = s.k_cache.repeat_interleave(s.h // s.kv, dim=1)
            v = s.v_cache.repeat_interleave(s.h // s.kv, dim=1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
            return s.wo(y.transpose(1, 2).contiguous().view(b, n, s.h * s.hd))

    class FF(nn.Module):
        def __init__(s, d=64, i=128):
            super().__init__()
            s.w1 = nn.Linear(d, i, bias=False)
            s.w3 = nn.Linear(d, i, bias=False)
            s.w2 = nn.Linear(i, d, bias=False)

        def forward(s, x):
            return s.w2(F.silu(s.w1(x)) * s.w3(x))

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.emb = nn.Embedding(128, 64)
            s.attn = nn.ModuleList(Attn() for _ in range(2))
            s.ff = nn.ModuleList(FF() for _ in range(2))
            s.norm = nn.RMSNorm(64)
            s.out = nn.Linear(64, 128, bias=False)
            s.register_buffer("fc", torch.randn(32, 8, 2))
            s.register_buffer("causal", torch.tril(torch.ones(32, 32, dtype=torch.bool)))

        def forward(s, idx, pos):
            x = s.emb(idx)
            fc = s.fc[pos]
            mask = s.causal[None, None, pos]
            for a, f in zip(s.attn, s.ff):
                x = x + a(s.norm(x), fc, pos, mask)
                x = x + f(s.norm(x))
            return s.out(x)

    torch.manual_seed(0)
    return _fin(M()), (ids(2, 8), torch.arange(8)), {}


@reg("meta_complex", "plain")
def _meta():
    """Meta llama reference style: complex RoPE (view_as_complex), pre-transpose rope, n_rep expand before transpose."""
    import torch.nn as nn
    import torch.nn.functional as F

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.emb = nn.Embedding(128, 64)
            s.wq = nn.Linear(64, 64, bias=False)
            s.wk = nn.Linear(64, 32, bias=False)
            s.wv = nn.Linear(64, 32, bias=False)
            s.wo = nn.Linear(64, 64, bias=False)
            s.w1 = nn.Linear(64, 128, bias=False)
            s.w3 = nn.Linear(64, 128, bias=False)
            s.w2 = nn.Linear(128, 64, bias=False)
            ang = torch.outer(torch.arange(32).float(), 1e4 ** (-torch.arange(0, 16, 2).float() / 16))
            s.register_buffer("cis", torch.polar(torch.ones_like(ang), ang))

        def forward(s, idx):
            x = s.emb(idx)
            b, n, _ = x.shape
            q, k, v = s.wq(x).view(b, n, 4, 16), s.wk(x).view(b, n, 2, 16), s.wv(x).view(b, n, 2, 16)
            c = s.cis[:n].view(1, n, 1, 8)

            def r(t):
                return (
                    torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * c)
                    .flatten(3)
                    .type_as(t)
                )

            q, k = r(q), r(k)

            def rep(t):
                return t[:, :, :, None, :].expand(b, n, 2, 2, 16).reshape(b, n, 4, 16)

            q, k, v = (t.transpose(1, 2) for t in (q, rep(k), rep(v)))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + s.wo(y.transpose(1, 2).reshape(b, n, 64))
            return x + s.w2(F.silu(s.w1(x)) * s.w3(x))

    torch.manual_seed(0)
    return _fin(M()), (ids(),), {}


@reg("nn_mha_encoder", "plain")
def _mha():
    import torch.nn as nn

    torch.manual_seed(0)
    m = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True),
        2,
        enable_nested_tensor=False,
    )
    return _fin(m), (torch.randn(2, 12, 64),), {}


def build(name):
    fam, fn = REG[name]
    return fn()


# ---------------------------------------------------------------- decoding with a cache
# transformers' StaticCache export fails for deepseek_v3, falcon_7b, lfm2 and bamba.
def cached(name, kind):
    """A decoder with its cache: (model, new_cache, steps). kind is "static" or "dynamic".

    new_cache() gives an empty cache of 32 positions; steps are keyword dicts for a prompt of 6 tokens and 8 single tokens, each
    to be called as model(**step, past_key_values=cache, use_cache=True).
    """
    from transformers import DynamicCache, StaticCache

    model, _, _ = build(name)
    model.config.use_cache = True
    model.config.get_text_config().use_cache = True
    new = (
        (lambda: StaticCache(config=model.config, max_cache_len=32))
        if kind == "static"
        else (lambda: DynamicCache(config=model.config))
    )
    tokens = ids(1, 14)
    return model, new, [dict(input_ids=tokens[:, :6])] + [dict(input_ids=tokens[:, i : i + 1]) for i in range(6, 14)]


def exported_step(name, max_len=32):
    """The ExportedProgram of one decode step over a static cache in mutated buffers, and its example inputs."""
    from transformers.integrations import executorch as hf

    model, _, _ = build(name)
    model.config.use_cache = True
    model.config.get_text_config().use_cache = True
    g = model.generation_config
    g.use_cache, g.cache_implementation, g.max_length = True, "static", max_len
    g.cache_config = {"batch_size": 1, "max_cache_len": max_len}
    inputs = dict(input_ids=torch.tensor([[5]]), cache_position=torch.tensor([3]))
    with torch.no_grad():
        return hf.TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=max_len).export(
            **inputs
        ), inputs
